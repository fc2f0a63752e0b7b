#!/bin/sh
# Build one target of the Dockerfile with the base image of images.env.
#
#   sh deploy/build.sh cpu|cuda NAME:TAG [more options of docker build, such as --push]
set -eu
if [ $# -lt 2 ]; then
    echo "usage: sh deploy/build.sh cpu|cuda NAME:TAG [options]" >&2
    exit 2
fi
target="$1" name="$2"
shift 2
here="$(dirname "$0")"
# shellcheck source=deploy/images.env
. "$here/images.env"
case "$PYTHON_IMAGE" in
*@sha256:*) ;;
*) echo "note: $PYTHON_IMAGE is not pinned by digest; sh deploy/pin.sh does that" >&2 ;;
esac
exec "${DOCKER:-docker}" build --file "$here/Dockerfile" --target "$target" --tag "$name" \
    --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE" "$@" "$here/.."
