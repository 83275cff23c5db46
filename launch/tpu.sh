#!/usr/bin/env bash
# usage: launch/tpu.sh ACTION NAME --zone=ZONE [option …] [-- STAGE --config=… --workdir=gs://…]
#
# Cloud TPU slices as queued resources, which are granted at once where there is room.
#
# actions
#   create   ask for the slice, or for several (--slices)
#   copy     copy this repository to every worker and install it there
#   run      start a stage on every worker; it goes on when you leave
#   keep     create, copy and run; do all of it again when the slice is preempted or a worker dies,
#            until the stage is done (the stage goes on from where it was). Stay connected
#   logs     follow the log of worker 0, or of --worker=all
#   stop     end the stage on every worker
#   status   show what there is
#   delete   give it back
#
# options
#   --zone=ZONE           where
#   --project=PROJECT     default: gcloud's
#   --type=TYPE           accelerator type, e.g. v5litepod-32, v5p-32, v6e-32 (create, keep)
#   --slices=N            slices of that type (create, keep); set config.mesh.data to it
#   --spot                cheaper, may be preempted (create, keep)
#   --runtime=VERSION     image of the VM; default: what Google names for the type
#   --restarts=N          times that keep starts again; default 100
#   --worker=N            worker that logs follows
#   --vm                  a TPU VM made without the queue (gcloud's tpu-vm): one slice, no keep
#   --create-flags=FLAGS  more for gcloud … create, e.g. '--network=NET --reserved'
#   --ssh-flags=FLAGS     more for gcloud … ssh and scp, e.g. --internal-ip
#   --dry-run             print the commands, run none
#
# Needs gcloud, and for several workers an ssh agent: ssh-add ~/.ssh/google_compute_engine
#
# launch/tpu.sh keep mine --zone=$ZONE --type=v6e-32 --slices=2 --spot -- \
#     train --config=configs/llama31_8b.py --workdir=gs://$BUCKET/llama31_8b --config.mesh.data=2

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"

POLL=60 # seconds between two looks at the queue
ARCHIVE=retmask_jax.tar.gz

zone='' project='' type='' slices=1 spot='' runtime='' restarts=100 worker=0 vm=''
create_flags='' ssh_flags=''
parse "spot vm" \
  "zone project type slices runtime restarts worker create-flags ssh-flags" "$@"
action=${words[0]-} name=${words[1]-}
[ -n "$name" ] || die "say what to do and with which: ACTION NAME (see --help)"
[ ${#words[@]} -eq 2 ] || die "${words[2]}: one NAME only; a stage comes after --"
need zone
[[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices=$slices: wants a positive number"
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts=$restarts: wants a number"
[ -z "$vm" ] || [ "$slices" = 1 ] || die "--vm is one slice; several need the queue"
where=(--zone="$zone" ${project:+--project="$project"})
read -ra more_create <<<"$create_flags"
read -ra more_ssh <<<"$ssh_flags"
group=queued-resources
[ -z "$vm" ] || group=tpu-vm

tpu() {
  run gcloud compute tpus "$group" "$@" "${where[@]}"
}

# Image by type: cloud.google.com/tpu/docs/runtimes, October 2025.
image() {
  case $type in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
    *) die "--runtime=VERSION is missing: no image is known for --type=$type" ;;
  esac
}

create() {
  need type
  local version flags
  version=${runtime:-$(image)} || exit
  flags=(--accelerator-type="$type" ${spot:+--spot} ${more_create[@]+"${more_create[@]}"})
  if [ -n "$vm" ]; then
    tpu create "$name" --version="$version" "${flags[@]}"
  elif [ "$slices" = 1 ]; then
    tpu create "$name" --runtime-version="$version" --node-id="$name" "${flags[@]}"
  else
    tpu create "$name" --runtime-version="$version" --node-count="$slices" \
      --node-prefix="$name" "${flags[@]}"
  fi
}

# on WORKERS VERB …: gcloud's ssh or scp with these workers (all: of all slices).
on() {
  local workers=(--worker="$1") verb=$2
  shift 2
  if [ -z "$vm" ] && [ "${workers[0]}" = --worker=all ]; then
    workers+=(--node=all)
  fi
  tpu "$verb" "$@" "${workers[@]}" ${more_ssh[@]+"${more_ssh[@]}"}
}

# The images' own Python is 3.10 on some types: uv brings one.
copy() {
  local install="set -e; mkdir -p retmask_jax; tar -xzf $ARCHIVE -C retmask_jax; cd retmask_jax; \
test -x ~/.local/bin/uv || curl -LsSf https://astral.sh/uv/install.sh | sh; \
~/.local/bin/uv venv --quiet --allow-existing --python 3.12 .venv; \
~/.local/bin/uv pip install --quiet --python .venv --editable '.[tpu]'"
  run tar -czf "${TMPDIR:-/tmp}/$ARCHIVE" -C "$ROOT" --exclude=__pycache__ \
    pyproject.toml README.md LICENSE retmask_jax models configs &&
    on all scp "${TMPDIR:-/tmp}/$ARCHIVE" "$name:" &&
    on all ssh "$name" --command="$install"
}

# What a worker does; retmask.log there has the output.
retmask() {
  printf 'cd retmask_jax || exit; set -o pipefail; JAX_COORDINATOR_PORT=%s %s' "$JAX_PORT" \
    "$1.venv/bin/retmask $(quote "${stage[@]}") $2"
}

start() {
  need_stage
  on all ssh "$name" --command="$(retmask 'nohup ' '>>retmask.log 2>&1 </dev/null &')"
}

# In front of the ssh connection, so that its end and status are seen here.
attend() {
  on all ssh "$name" --ssh-flag=-oServerAliveInterval=30 \
    --command="$(retmask '' '2>&1 | tee -a retmask.log')"
}

# The brackets keep pkill from ending the shell that calls it.
stop() {
  on all ssh "$name" --command="pkill -f '[.]venv/bin/retmask' || true"
}

state() {
  tpu list --filter="name~/$name\$" --format='value(state.state)'
}

# Returns when every slice is there.
ready() {
  local now
  while :; do
    now=$(state) || now=UNKNOWN
    if [ -n "$dry_run" ]; then
      echo "$now"
      now=''
    fi
    case $now in
      ACTIVE) return ;;
      '')
        create || return
        [ -z "$dry_run" ] || return 0
        ;;
      SUSPENDED | FAILED)
        note "$name is $now: giving it back, to ask again"
        tpu delete "$name" --force --quiet || return
        ;;
      *)
        note "$name is $now"
        sleep "$POLL"
        ;;
    esac
  done
}

keep() {
  need type
  need_stage
  [ -z "$vm" ] || die "keep needs the queue, not --vm"
  local round status begun=''
  for ((round = 0; round <= restarts; round++)); do
    [ "$round" = 0 ] || note "starting again, $round of $restarts"
    if ready && copy && stop; then
      begun=1 status=0
      attend || status=$?
      case $status in
        0) return ;;
        2) die "the stage refused to start; its line is above" ;;
      esac
    elif [ -z "$begun" ]; then
      note "could not be set up; see above"
      return 1
    fi
    sleep "$POLL"
  done
  note "gave up after $restarts restarts"
  return 1
}

case $action in
  create | copy | stop | keep) "$action" ;;
  run) start ;;
  logs) on "$worker" ssh "$name" --command='tail -n 100 -F retmask_jax/retmask.log' ;;
  status) tpu describe "$name" ;;
  delete)
    force=(--force)
    [ -z "$vm" ] || force=()
    tpu delete "$name" ${force[@]+"${force[@]}"} --quiet
    ;;
  *) die "$action: no such action; it is create, copy, run, keep, logs, stop, status or delete" ;;
esac
