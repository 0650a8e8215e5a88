#!/usr/bin/env bash
# NOT YET SERVED: sglang-hisparse 0.1.0 refuses --disaggregation-mode decode at start; this is the command to come.
#
# The decode instance of a prefill-decode pair: GLM-5.1-FP8 on one machine with eight H20 of 141 GB (those with 96 GB do
# not hold the weights).
#
#   scripts/launch_pd_decode.sh [--dry-run] [further arguments of sglang.launch_server, which win over these]
#
# By environment:
#   MODEL_PATH       zai-org/GLM-5.1-FP8
#   HISPARSE_CONFIG  configs/glm-5.1-fp8-h20x8-decode.json of this checkout (a file)
#   IB_DEVICE        mlx5_0,mlx5_1,mlx5_2,mlx5_3   names under /sys/class/infiniband; empty: SGLang looks for them
#   TP_SIZE          8                     GPUs of the instance
#   ATTN_DP_SIZE     TP_SIZE               of these, attention groups, each with requests and a host pool of its own
#   MEM_FRACTION     0.85                  --mem-fraction-static
#   MAX_RUNNING      480                   --max-running-requests, all groups together
#   HOST, PORT       127.0.0.1, 30000      HOST must be reachable from the router
#   NNODES, NODE_RANK, DIST_INIT_ADDR      1, 0, 127.0.0.1:5757: several machines as one instance
#   PYTHON           python3               the interpreter that has sglang and sglang-hisparse
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/launch_common.sh"

echo "note: sglang-hisparse 0.1.0 does not serve prefill-decode disaggregation; the server will refuse to start" >&2
config=$(settings "${HISPARSE_CONFIG:-$here/../configs/glm-5.1-fp8-h20x8-decode.json}")
join_nodes
command=(
  "${PYTHON:-python3}" -m sglang.launch_server
  --model-path "${MODEL_PATH:-zai-org/GLM-5.1-FP8}" --trust-remote-code --watchdog-timeout 100000
  --host "${HOST:-127.0.0.1}" --port "${PORT:-30000}"
  --chunked-prefill-size 65536 --max-running-requests "${MAX_RUNNING:-480}"
  --mem-fraction-static "${MEM_FRACTION:-0.85}"
  --tp-size "${TP_SIZE:-8}" --attn-dp-size "${ATTN_DP_SIZE:-${TP_SIZE:-8}}" --load-balance-method round_robin
  --kv-cache-dtype bfloat16 --dsa-decode-backend flashmla_sparse
  --disaggregation-mode decode
  "${nodes[@]}"
  --enable-hisparse --hisparse-config "$config"
)
ib_device=${IB_DEVICE-mlx5_0,mlx5_1,mlx5_2,mlx5_3}
if [[ -n "$ib_device" ]]; then
  command+=(--disaggregation-ib-device "$ib_device")
fi
start "$@"
