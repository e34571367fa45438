#!/usr/bin/env bash
# Make a drafter for TinyLlama: texts of the target, then a small chat model that gets the target's tokens and is
# trained on these texts.
#
#   scripts/tinyllama_drafter.sh FOLDER
#
# FOLDER gets `data` and `drafter`. The same command continues an interrupted run. Variables: TARGET, START (the model
# that training starts from), TOKENS (of the texts), MINUTES (of training), PROMPTS (a file; those of the package if not
# set), DRAFTREE (the command), DATA_OPTIONS and TRAIN_OPTIONS (further options, which override those below).
set -euo pipefail

folder=${1:?give a folder for the data and the drafter}
target=${TARGET:-tinyllama-1.1b-chat}
start=${START:-smollm2-135m-instruct}
read -ra draftree <<<"${DRAFTREE:-draftree}"
read -ra data_options <<<"${DATA_OPTIONS:-}"
read -ra train_options <<<"${TRAIN_OPTIONS:-}"
prompts=()
if [[ -n ${PROMPTS:-} ]]; then prompts=(--prompts "$PROMPTS"); fi
resume=()
if [[ -e $folder/drafter/training ]]; then resume=(--resume); fi

# The default options, without those that the user gives: an option may be given once only.
#   merged 'DEFAULTS' OPTIONS…: sets `options`
merged() {
    local -a defaults
    read -ra defaults <<<"$1"
    shift
    options=("$@")
    local i
    for ((i = 0; i < ${#defaults[@]}; i += 2)); do
        if [[ " $* " != *" ${defaults[i]} "* && " $* " != *" ${defaults[i]}="* ]]; then
            options+=("${defaults[i]}" "${defaults[i + 1]}")
        fi
    done
}

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
# a whole model reads tokens only: without hidden states, a text takes 2% of the space
merged "--limit-tokens ${TOKENS:-400000} --features none --teacher top-k:64" "${data_options[@]}"
"${draftree[@]}" train data "$target" --output "$folder/data" "${prompts[@]}" "${options[@]}"
# Muon needs seconds for an update of matrices of this width on a CPU, and trained weights need a low rate
merged "--minutes ${MINUTES:-60} --optimizer adamw --learning-rate 2e-4 --warm-up 10 --batch-tokens 2048" "${train_options[@]}"
"${draftree[@]}" train distill "$target" --data "$folder/data" --output "$folder/drafter" --from "$start" \
    "${resume[@]}" "${options[@]}"
echo "$folder/drafter: compare it with other drafters, and keep the fastest for --draft auto:"
echo "  ${draftree[*]} tune $target --draft model:$folder/drafter"
