#!/usr/bin/env bash
# usage: launch/gke.sh ACTION [NAME] [option …] [-- STAGE --config=… --workdir=gs://…]
#
# TPU slices of a GKE cluster, with xpk (pip install xpk; `xpk cluster create` makes the cluster).
#
# actions
#   image    build launch/Dockerfile and push it as --image
#   run      start a stage as workload NAME; it is started again when a slice is preempted or a
#            worker dies, and goes on from where it was
#   logs     follow the log of every worker of NAME
#   status   list the cluster's workloads
#   delete   end NAME
#
# options
#   --cluster=CLUSTER    which (all actions but image and logs)
#   --image=IMAGE        where the image is, e.g. an Artifact Registry path that the nodes can read
#                        (image, run)
#   --type=TYPE          accelerator type, e.g. v5litepod-32, v5p-32, v6e-32 (run)
#   --slices=N           slices of that type (run); set config.mesh.data to it
#   --restarts=N         times that it is started again; default 100 (run)
#   --zone=ZONE          default: gcloud's
#   --project=PROJECT    default: gcloud's
#   --xpk-flags=FLAGS    more for xpk workload create, e.g. '--spot --priority=high' (run)
#   --dry-run            print the commands, run none
#
# Needs docker for image; xpk, gcloud and kubectl for the others.
#
# launch/gke.sh run mine --cluster=pods --image=$IMAGE --type=v6e-32 --slices=2 -- \
#     train --config=configs/llama31_8b.py --workdir=gs://$BUCKET/llama31_8b --config.mesh.data=2

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"

cluster='' image='' type='' slices=1 restarts=100 zone='' project='' xpk_flags=''
parse "" "cluster image type slices restarts zone project xpk-flags" "$@"
action=${words[0]-} name=${words[1]-}
[ ${#words[@]} -le 2 ] || die "${words[2]}: one NAME only; a stage comes after --"
[[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices=$slices: wants a positive number"
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts=$restarts: wants a number"
read -ra more <<<"$xpk_flags"

need_name() {
  [ -n "$name" ] || die "which workload? $action NAME (see --help)"
}

xpk() {
  need cluster
  run xpk workload "$@" --cluster="$cluster" ${zone:+--zone="$zone"} \
    ${project:+--project="$project"}
}

# Failures (1) and what xpk restarts by itself (killed, evicted) start again; mistakes (2) do not.
start() {
  need_name
  need cluster image type
  need_stage
  xpk create --workload="$name" --docker-image="$image" --tpu-type="$type" --num-slices="$slices" \
    --max-restarts="$restarts" --restart-on-exit-codes=1 --env=JAX_COORDINATOR_PORT="$JAX_PORT" \
    --command="retmask $(quote "${stage[@]}")" ${more[@]+"${more[@]}"}
}

case $action in
  image)
    need image
    run docker build --tag="$image" --file="$ROOT/launch/Dockerfile" "$ROOT"
    run docker push "$image"
    ;;
  run) start ;;
  logs)
    need_name
    run kubectl logs --follow --prefix --all-containers --max-log-requests=1024 \
      --selector=jobset.sigs.k8s.io/jobset-name="$name"
    ;;
  status) xpk list ;;
  delete)
    need_name
    xpk delete --workload="$name" --force
    ;;
  '') die "what to do? image, run, logs, status or delete (see --help)" ;;
  *) die "$action: no such action; it is image, run, logs, status or delete" ;;
esac
