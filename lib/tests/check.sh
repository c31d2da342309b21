#!/bin/sh
# Compiles the tests in C that need neither root nor Go, and runs them: check.sh OUT PASS... (make -C lib check). Prints a line for each test, and the numbers of those
# that passed, failed and were skipped. The other programs of the folders "tests" need a writer of slot tables or network namespaces; go test ./lib/... runs them.
set -u
cd "$(dirname "$0")/.." || exit 2
out=$1
shift
: "${CC:=cc}" "${MAKE:=make}" "${SEED:=1}"
passed=0 failed=0 skipped=0
tables=../internal/slotfile/testdata
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

# result prints PASS, FAIL or SKIP of a test, and the log of one that failed.
result() {
  case $1 in
  PASS) passed=$((passed + 1)) ;;
  FAIL) failed=$((failed + 1)) ;;
  SKIP) skipped=$((skipped + 1)) ;;
  esac
  echo "$*"
  if [ "$1" = FAIL ]; then sed 's/^/    /' "$work/log"; fi
}

# build makes a target of a folder's Makefile, and reports the failure as that of a test.
build() { # test folder arguments
  name=$1 folder=$2
  shift 2
  "$MAKE" -s -C "$folder" "$@" >"$work/log" 2>&1 && return
  result FAIL "$name does not compile"
  return 1
}

# run runs a test; with =FILE, its output must equal that of the file.
run() { # name [=FILE] command...
  name=$1 want=
  shift
  case $1 in =*) want=${1#=} && shift ;; esac
  if ! "$@" >"$work/log" 2>&1; then
    result FAIL "$name"
  elif [ -n "$want" ] && ! diff "$work/log" "$want" >"$work/diff"; then
    mv "$work/diff" "$work/log"
    result FAIL "$name differs from $want"
  else
    result PASS "$name"
  fi
}

# both runs the tests of the passes plain and memory.
both() { # pass
  pass=$1 to=$out/tests/$1
  build "unit ($pass)" . OUT="$out" "$to/unit" && run "unit ($pass)" "$to/unit" $tables/v2.slots testdata/keys.txt 4000
  if build "dump ($pass)" . OUT="$out" "$to/dump"; then
    for table in v2 v2-unnamed v2-steered; do run "dump $table ($pass)" =$tables/$table.txt "$to/dump" $tables/$table.slots; done
  fi
  grep -v '^T ' testdata/abi.txt | grep -v '^A ' >"$work/abi"
  build "abi ($pass)" . OUT="$out" "$to/abi" && run "abi ($pass)" ="$work/abi" "$to/abi"
  build "deal ($pass)" . OUT="$out" "$to/deal" && run "deal ($pass)" "$to/deal"
  build "wire_unit ($pass)" softdev OUT="$out" "$to/wire_unit" && run "wire_unit ($pass)" "$to/wire_unit"
  if [ -z "$verbs" ]; then
    result SKIP "engine ($pass): needs the headers of libibverbs (Debian package libibverbs-dev)"
  elif build "engine ($pass)" softdev OUT="$out" "$to/engine"; then
    for loss in 0 20 100; do run "engine, loss $loss of 10,000 ($pass)" "$to/engine" "$SEED" 20000 $loss; done
    build "rnr ($pass)" softdev OUT="$out" "$to/rnr" && run "rnr ($pass)" "$to/rnr"
    build "timeout ($pass)" softdev OUT="$out" "$to/timeout" && run "timeout ($pass)" "$to/timeout"
    build "slots ($pass)" softdev OUT="$out" "$to/slots" && run "slots ($pass)" "$to/slots" $tables/v2.slots
  fi
  case $pass in plain) flags=-O2 ;; *) flags="-O1 -g $(flags "$pass")" ;; esac
  build "nccl-net-check ($pass)" nccl OUT="$to" CFLAGS="$flags" LDFLAGS="$flags" "$to/nccl-net-check" "$to/sockets.so" || return
  for op in allreduce grouped; do run "nccl-net-check $op ($pass)" ranks "$to" --op $op --bytes 1000000 --iterations 2; done
}

# ranks runs a job of two processes of nccl-net-check over plain sockets.
ranks() { # folder argument...
  folder=$1
  shift
  rm -rf "$work/job" && mkdir "$work/job"
  for rank in 0 1; do
    SOCKETS_ADDRESS=127.88.0.$((rank + 1)) "$folder/nccl-net-check" --plugin "$folder/sockets.so" --rank $rank --ranks 2 --rendezvous "$work/job" --timeout 120 "$@" &
  done
  status=0
  for process in $(jobs -p); do wait "$process" || status=1; done
  return $status
}

# threads runs the test of the pass thread.
threads() { # pass
  to=$out/tests/$1
  build "race ($1)" . OUT="$out" "$to/race" || return
  cp $tables/v2.slots "$work/slots"
  # The sanitizer needs the addresses that randomization of the address space may take.
  run "race ($1)" setarch -R "$to/race" "$work/slots" 2
}

flags() { sed -n "s/^PASS_$1 *:= *-O1 //p" tests/passes.mk; }

verbs=$(echo '#include <infiniband/verbs.h>' | $CC -E -x c - >/dev/null 2>&1 && echo yes)
echo 'int main(void) { return 0; }' >"$work/empty.c"
for pass in "$@"; do
  # shellcheck disable=SC2046 # words are options
  if [ "$pass" != plain ] && ! $CC $(flags "$pass") -o "$work/empty" "$work/empty.c" 2>/dev/null; then
    result SKIP "all ($pass): $CC has no $(flags "$pass")"
  elif [ "$pass" = thread ] && ! command -v setarch >/dev/null; then
    result SKIP "race ($pass): needs setarch (Debian package util-linux)"
  elif [ "$pass" = thread ]; then
    threads "$pass"
  elif [ "$pass" = plain ] || [ "$pass" = memory ]; then
    both "$pass"
    if [ "$pass" = plain ] && [ -n "$verbs" ] && build "core ($pass)" softdev OUT="$out" "$out/tests/core.o"; then result PASS "core ($pass)"; fi
    if [ "$pass" = plain ] && build "close ($pass)" . OUT="$out" "$out/libfared.so" "$out/tests/$pass/close"; then
      run "close ($pass)" "$out/tests/$pass/close" "$out/libfared.so" $tables/v2.slots
    fi
  else
    echo "$pass" >"$work/log"
    result FAIL "unknown pass: plain, memory and thread are known"
  fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
