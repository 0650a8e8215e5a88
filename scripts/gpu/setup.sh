#!/bin/bash
# setup.sh: on the GPU machine, from the repository root, before the verify and bench scripts: installs this package into
# PLUGIN, unpacks the kernel caches into CACHE, writes the checkpoint to MODEL. Safe to call again; only the package is redone.
set -euo pipefail
site=${SITE:-/opt/site} plugin=${PLUGIN:-/opt/plugin} cache=${CACHE:-/opt/cache} model=${MODEL:-/opt/tiny-dsa}
archive=${CACHE_ARCHIVE:-.gpu/cache.tar.xz} wheels=${WHEELS:-.gpu/wheels}
[ -d "$site/sglang" ] || { echo "SGLang is not in $site: run scripts/gpu/unpack.sh first" >&2; exit 1; }

rm -rf "$plugin"
python3 -m pip install -q --no-deps --no-build-isolation --no-index --target "$plugin" .
for name in typer rich msgspec aiohttp; do
    PYTHONPATH=$site python3 -c "import $name" 2> /dev/null && continue
    echo "$name is missing, installing it from $wheels"
    python3 -m pip install -q --no-deps --no-index --find-links "$wheels" --target "$site" "$name"
done
PYTHONPATH=$plugin:$site python3 - << 'CHECK'
from importlib.metadata import entry_points, version
(point,) = entry_points(group="sglang.srt.plugins", name="hisparse")
point.load()
print("sglang-hisparse", version("sglang-hisparse"), "with SGLang", version("sglang"), "->", point.value)
CHECK

mkdir -p "$cache"
if [ -f "$archive" ] && [ ! -e "$cache/.unpacked" ]; then
    xz -dc -T0 "$archive" | tar -xf - -C "$cache"
    touch "$cache/.unpacked"
    echo "kernel caches: $(du -sh "$cache" | cut -f1)"
fi
[ -f "$model/config.json" ] || python3 scripts/make_tiny_dsa.py "$model" --seed "${SEED:-2026}"
