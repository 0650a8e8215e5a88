#!/bin/bash
# unpack.sh PARTS_FOLDER [SITE]: put the carried SGLang together and say what is there. A second call does nothing.
set -euo pipefail
parts=${1:-/opt/b} site=${2:-/opt/site}
if [ -e "$site/sglang/version.py" ] || [ -d "$site/sglang" ]; then echo "$site is unpacked already"; exit 0; fi
ls "$parts"/part?? > /dev/null || { echo "no parts in $parts" >&2; exit 1; }
mkdir -p "$site.partial"
cat "$parts"/part?? | xz -dc -T0 | tar -xf - -C "$site.partial"
mv "$site.partial" "$site"
du -sh "$site"
