#!/bin/bash
# Builds the CPU image and trains in it, as its user, with rayfcp as the main process. Needs no daemon and no registry:
# the base is Debian by debootstrap, the builder is buildah without a runtime. On Debian or Ubuntu, as root:
#   apt-get install buildah debootstrap
#   jobs/docker/check.sh [OPTION of buildah build ...]     e.g. --volume /etc/pip.conf:/etc/pip.conf:ro
set -euo pipefail
cd "$(dirname "$0")/../.."

work=$(mktemp -d)
export CONTAINERS_STORAGE_CONF=$work/storage.conf BUILDAH_ISOLATION=chroot
printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/graph"\n' "$work" "$work" >"$CONTAINERS_STORAGE_CONF"
trap 'buildah rm --all >/dev/null; rm -rf --one-file-system "$work"' EXIT

base=localhost/debian:bookworm-slim image=localhost/rayfcp:cpu
debootstrap --variant=minbase bookworm "$work/root" >"$work/debootstrap.log" || { tail "$work/debootstrap.log" >&2; exit 1; }
empty=$(buildah from scratch)
buildah add --quiet "$empty" "$work/root" / >/dev/null
buildah commit --quiet --rm "$empty" "$base" >/dev/null
rm -rf "$work/root"

index=$(sed -n '/^  cpu:/,/^$/ s/^ *TORCH_INDEX: //p' jobs/docker/compose.yaml)
buildah build --pull-never --build-arg "BASE=$base" --build-arg "TORCH_INDEX=$index" "$@" \
    --tag "$image" --file jobs/docker/Dockerfile .

container=$(buildah from --pull-never "$image")
run() { buildah run "$container" -- tini -s -- "$@"; }
echo "== size, user, and what is installed"
buildah images "$image"
run id
run rayfcp doctor jobs/quickstart.yaml || true   # this machine may be smaller than the quickstart's workers ask for
echo "== planners are compiled: a second warm-up compiles nothing"
time run rayfcp warm-up
echo "== the quickstart"
run rayfcp train jobs/quickstart.yaml train.steps=20 cluster.num_workers=2
run ls runs/quickstart/checkpoints
