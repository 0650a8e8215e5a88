# What the launch scripts share: how a command is shown or started. Sourced by them; it sets no flag of the server.

# settings FILE: its text on one line, as --hisparse-config takes it.
settings() {
  tr -s '[:space:]' ' ' <"$1" | sed 's/ $//'
}

# join_nodes: the flags that make several machines one server, into the array `nodes`.
join_nodes() {
  if ((${NNODES:-1} > 1)) && [[ -z "${DIST_INIT_ADDR:-}" ]]; then
    echo "NNODES is ${NNODES}: set DIST_INIT_ADDR to host:port of the machine with NODE_RANK 0" >&2
    return 2
  fi
  nodes=(--dist-init-addr "${DIST_INIT_ADDR:-127.0.0.1:5757}" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}")
}

# start ARGUMENTS: run the array `command` with ARGUMENTS after it; with --dry-run among them, print it instead, such
# that a shell would run it.
start() {
  local word show=
  for word; do
    if [[ "$word" == --dry-run ]]; then show=1; else command+=("$word"); fi
  done
  [[ -n "$show" ]] || exec "${command[@]}"
  for word in "${command[@]}"; do
    [[ "$word" =~ ^[[:alnum:]_./:,=@%+-]+$ ]] || word=${word@Q}
    printf '%s ' "$word"
  done
  echo
}
