# What the scripts beside it share; they source it. bash 3.2 or newer.
# shellcheck shell=bash disable=SC2034

# JAX's processes meet at this port of the first host. The firewall rule that comes with a TPU slice
# opens it, but not 8482, which JAX takes by itself since 0.8.1: on v6e, runs over several slices
# then hang at the start (github.com/jax-ml/jax/issues/35905).
JAX_PORT=8476

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry_run=''

# Says in one line what is wrong, and stops.
die() {
  echo "$(basename "$0"): error: $*" >&2
  exit 2
}

note() {
  echo "$(basename "$0"): $*" >&2
}

# Prints the comment at the head of the script.
help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# Prints words as a shell has to be given them.
quote() {
  local word option line='' inner="'\\''"
  for word; do
    option=''
    if [[ $word =~ ^--[A-Za-z0-9._-]+= ]]; then
      option=${BASH_REMATCH[0]}
      word=${word#"$option"}
    fi
    case $word in
      *[!A-Za-z0-9_@%+=:,./-]*) word="'${word//\'/$inner}'" ;;
      '') word="''" ;;
    esac
    line="$line${line:+ }$option$word"
  done
  printf '%s' "$line"
}

# Runs a command; with --dry-run prints it.
run() {
  if [ -n "$dry_run" ]; then
    quote "$@" && echo
  else
    "$@"
  fi
}

# parse "FLAG …" "OPTION …" ARG …: a given --FLAG sets the variable FLAG to 1, --OPTION=VALUE sets
# OPTION (dashes are underscores there). Other words go to the array `words`, those after -- to the
# array `stage`.
parse() {
  local flags=" $1 " options=" $2 " arg name
  shift 2
  words=() stage=()
  while [ $# -gt 0 ]; do
    arg=$1
    shift
    name=${arg%%=*}
    name=${name#--}
    case $arg in
      -h | --help)
        help
        exit
        ;;
      --dry-run) dry_run=1 ;;
      --)
        stage=("$@")
        return
        ;;
      -*)
        if [[ $flags == *" $name "* && $arg == "--$name" ]]; then
          printf -v "${name//-/_}" 1
        elif [[ $options != *" $name "* ]]; then
          die "$arg: no such option (see --help)"
        elif [[ $arg != *=?* ]]; then
          die "--$name wants a value: --$name=VALUE"
        else
          printf -v "${name//-/_}" %s "${arg#*=}"
        fi
        ;;
      *) words+=("$arg") ;;
    esac
  done
}

# need NAME …: stops if one of the variables is empty.
need() {
  local name
  for name; do
    [ -n "${!name}" ] || die "--${name//_/-}=… is missing (see --help)"
  done
}

# Stops if no stage follows --.
need_stage() {
  [ ${#stage[@]} -gt 0 ] || die "which stage? end with: -- STAGE --config=FILE --workdir=DIR"
}
