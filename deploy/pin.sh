#!/bin/sh
# Write the digest that the base image's tag stands for today into images.env. Needs docker with buildx and the network.
#
#   sh deploy/pin.sh                      the tag that is there
#   sh deploy/pin.sh python:3.12-slim     another
set -eu
file="$(dirname "$0")/images.env"
tag="${1:-$(sed -n 's/^PYTHON_IMAGE=\([^@]*\).*/\1/p' "$file")}"
digest="$(docker buildx imagetools inspect "$tag" --format '{{.Manifest.Digest}}')"
case "$digest" in
sha256:????????????????????????????????????????????????????????????????) ;;
*) echo "no digest for $tag: $digest" >&2 && exit 1 ;;
esac
sed -i "s|^PYTHON_IMAGE=.*|PYTHON_IMAGE=$tag@$digest|" "$file"
grep '^PYTHON_IMAGE=' "$file"
