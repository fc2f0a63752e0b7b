#!/bin/sh
# Make FOLDER/venv with tinker-cookbook and FOLDER/source with its source distribution, which alone has its tests.
#
#   environment.sh PYTHON FOLDER      PYTHON is that of the project's development environment
#
# The new environment lies over the project's own, so that torch, transformers and the SDK are not installed again.
set -eu
python=$1 folder=$2 version=0.6.1
here=$(dirname "$0")

rm -rf "$folder"
"$python" -m venv "$folder/venv"
inner=$folder/venv/bin/python
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$packages" > "$("$inner" -c "$packages")/project.pth"
# pip warns that the cookbook's tml-renderers>=0.4.1 is not there: see requirements.txt.
"$inner" -m pip install --quiet --disable-pip-version-check --no-deps "tinker-cookbook==$version"
"$inner" -m pip install --quiet --disable-pip-version-check --requirement "$here/requirements.txt"
"$inner" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary tinker-cookbook \
    --dest "$folder" "tinker-cookbook==$version"
mkdir "$folder/source"
tar xzf "$folder/tinker_cookbook-$version.tar.gz" --strip-components 1 --directory "$folder/source"
touch "$folder/.ready"
