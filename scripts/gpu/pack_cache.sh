#!/bin/bash
# pack_cache.sh FILE: pack the compiled kernels of CACHE, so that the next machine starts warm. Reports the size.
set -euo pipefail
cache=${CACHE:-/opt/cache} file=${1:?usage: pack_cache.sh FILE}
tar -C "$cache" --exclude=.unpacked --exclude='*.tmp' -cf - . | xz -T0 -6 > "$file"
ls -l "$file" | awk '{print $5, $9}'
