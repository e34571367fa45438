#!/bin/sh
# What serving.py needs beside install.sh: sh benchmarks/peers/install_servers.sh FOLDER [FOLDER-OF-THE-MODEL]
# guidellm, `transformers serve`, and a copy of the model without an end of text, because that server refuses the field
# ignore_eos. TORCH names the package of torch, for example a build for processors.
set -eu
to=${1:?"say into which folder: sh benchmarks/peers/install_servers.sh build/peers"}
here=$(cd "$(dirname "$0")" && pwd)
model=${2:-$("$here/../../.venv/bin/draftree" models path smollm2-135m-instruct)}
python=${PYTHON:-python3}
mkdir -p "$to"
cd "$to"

for packages in guidellm 'transformers[serving]'; do
    name=${packages%%\[*}
    if [ ! -e "$name/installed" ]; then
        "$python" -m venv "$name"
        "$name/bin/python" -m pip install --quiet "${TORCH:-torch}" "$packages"
        touch "$name/installed"
    fi
done
mkdir -p no-eos/smollm2
ln -sf "$model"/* no-eos/smollm2/
rm no-eos/smollm2/generation_config.json
echo '{"pad_token_id": 2}' > no-eos/smollm2/generation_config.json
echo "servers and guidellm are in $to"
