#!/usr/bin/env bash
# Make a drafter for TinyLlama: texts of the target, then a small model with the same tokens that is trained on them.
#
#   scripts/tinyllama_drafter.sh FOLDER
#
# FOLDER gets `data` and `drafter`. The same command continues an interrupted run. Variables: TARGET, START (the model
# that training starts from), TOKENS (of the texts), MINUTES (of training), PROMPTS (a file; those of the package if not
# set), DRAFTREE (the command), DATA_OPTIONS and TRAIN_OPTIONS (further options).
set -euo pipefail

folder=${1:?give a folder for the data and the drafter}
target=${TARGET:-tinyllama-1.1b-chat}
start=${START:-stories15m}
read -ra draftree <<<"${DRAFTREE:-draftree}"
read -ra data_options <<<"${DATA_OPTIONS:-}"
read -ra train_options <<<"${TRAIN_OPTIONS:-}"
prompts=()
if [[ -n ${PROMPTS:-} ]]; then prompts=(--prompts "$PROMPTS"); fi
resume=()
if [[ -e $folder/drafter/training ]]; then resume=(--resume); fi

mkdir -p "$folder"
# stories15m reads 256 tokens: longer texts are of little use
"${draftree[@]}" train data "$target" --output "$folder/data" --limit-tokens "${TOKENS:-400000}" \
    "${prompts[@]}" "${data_options[@]}"
"${draftree[@]}" train distill "$target" --data "$folder/data" --output "$folder/drafter" --from "$start" \
    --minutes "${MINUTES:-60}" "${resume[@]}" "${train_options[@]}"
echo "$folder/drafter: compare it with other drafters, and keep the fastest:"
echo "  ${draftree[*]} tune $target --draft model:$folder/drafter"
