#!/usr/bin/env bash
# Starts a server that prefills and decodes: GLM-5.1-FP8 on one machine with eight H200, attention data-parallel.
#
#   scripts/launch_colocated.sh [--dry-run] [further arguments of sglang.launch_server, which win over these]
#
# The cache is bf16, SGLang's choice for DSA models on Hopper. The radix cache stays on.
# Other models and machines, by environment:
#   MODEL_PATH       zai-org/GLM-5.1-FP8   for DeepSeek-V3.2: deepseek-ai/DeepSeek-V3.2
#   HISPARSE_CONFIG  configs/glm-5.1-fp8-h200x8.json of this checkout (a file)
#   TP_SIZE          8                     GPUs of the server
#   ATTN_DP_SIZE     TP_SIZE               of these, attention groups, each with requests and a host pool of its own
#   MEM_FRACTION     0.85                  --mem-fraction-static
#   MAX_RUNNING      480                   --max-running-requests, all groups together
#   HOST, PORT       127.0.0.1, 30000
#   NNODES, NODE_RANK, DIST_INIT_ADDR      1, 0, none: several machines as one server
#   PYTHON           python3               the interpreter that has sglang and sglang-hisparse
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/launch_common.sh"

config=$(settings "${HISPARSE_CONFIG:-$here/../configs/glm-5.1-fp8-h200x8.json}")
join_nodes
command=(
  "${PYTHON:-python3}" -m sglang.launch_server
  --model-path "${MODEL_PATH:-zai-org/GLM-5.1-FP8}" --trust-remote-code --watchdog-timeout 100000
  --host "${HOST:-127.0.0.1}" --port "${PORT:-30000}"
  --chunked-prefill-size 65536 --max-running-requests "${MAX_RUNNING:-480}"
  --mem-fraction-static "${MEM_FRACTION:-0.85}"
  --tp-size "${TP_SIZE:-8}" --attn-dp-size "${ATTN_DP_SIZE:-${TP_SIZE:-8}}"
  --enable-hisparse --hisparse-config "$config"
)
if ((${NNODES:-1} > 1)); then
  command+=("${nodes[@]}")
fi
start "$@"
