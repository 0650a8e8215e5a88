#!/usr/bin/env bash
# Starts the prefill instance of a prefill-decode pair: GLM-5.1-FP8 on one machine with eight H20 of 141 GB.
#
#   scripts/launch_pd_prefill.sh [--dry-run] [further arguments of sglang.launch_server, which win over these]
#
# It runs plain SGLang: no HiSparse flag, and sglang-hisparse, if installed, changes nothing. By environment:
#   MODEL_PATH       zai-org/GLM-5.1-FP8
#   IB_DEVICE        mlx5_0,mlx5_1,mlx5_2,mlx5_3   names under /sys/class/infiniband; empty: SGLang looks for them
#   TP_SIZE          8                     GPUs of the instance
#   ATTN_DP_SIZE     TP_SIZE               of these, attention groups
#   MEM_FRACTION     0.8                   --mem-fraction-static
#   MAX_RUNNING      480                   --max-running-requests, all groups together
#   HOST, PORT       127.0.0.1, 30000      HOST must be reachable from the router and the decode instance
#   NNODES, NODE_RANK, DIST_INIT_ADDR      1, 0, 127.0.0.1:5757: several machines as one instance
#   PYTHON           python3               the interpreter that has sglang
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/launch_common.sh"

join_nodes
command=(
  "${PYTHON:-python3}" -m sglang.launch_server
  --model-path "${MODEL_PATH:-zai-org/GLM-5.1-FP8}" --trust-remote-code --watchdog-timeout 100000
  --host "${HOST:-127.0.0.1}" --port "${PORT:-30000}"
  --chunked-prefill-size 65536 --max-running-requests "${MAX_RUNNING:-480}"
  --mem-fraction-static "${MEM_FRACTION:-0.8}"
  --tp-size "${TP_SIZE:-8}" --attn-dp-size "${ATTN_DP_SIZE:-${TP_SIZE:-8}}" --schedule-conservativeness 0.5
  --disaggregation-mode prefill
  "${nodes[@]}"
)
ib_device=${IB_DEVICE-mlx5_0,mlx5_1,mlx5_2,mlx5_3}
if [[ -n "$ib_device" ]]; then
  command+=(--disaggregation-ib-device "$ib_device")
fi
start "$@"
