#!/usr/bin/env bash
# Runs every test under the race detector and shows what matters: packages, failures, skips. The whole log is in
# out/test.log. With FARED_REQUIRE_ALL=1 a skipped test is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
# Three packages at once, on few processors too: fabrics of namespaces and containers mostly wait.
go test -race -p "$(($(nproc) > 3 ? $(nproc) : 3))" -count=1 -timeout 20m -v ./... >out/test.log 2>&1
code=$?
# What is one goroutine does little under the race detector and all of it here, as do the million operations of each transport against the model: ten
# million mutated messages through the guard and the parser behind it, the largest fabrics, random events. At once, for neither keeps two processors busy.
FARED_MUTATIONS=10000000 go test -p 1 -count=1 -timeout 10m -v -run 'Mutations|Memory|TestLargest|TestRandomEvents|TestIncremental' \
  ./daemon ./daemon/internal/guard ./fare ./wecmp >out/full.log 2>&1 &
FARED_OPERATIONS=1000000 go test -p 1 -count=1 -timeout 10m -v -run 'Sets$|TestMillion|TestTCPUnderLoss' ./dataplane/rdma/rdmatest ./dataplane/transports >>out/test.log 2>&1 || code=1
wait $! || code=1
cat out/full.log >>out/test.log
grep -E '^(ok|FAIL|panic:|\?)|^(---|    ---) FAIL|no test files' out/test.log | grep -v 'no test files'
passed=$(grep -cE '^ *--- PASS' out/test.log)
failed=$(grep -cE '^ *--- FAIL' out/test.log)
skipped=$(grep -cE '^ *--- SKIP' out/test.log)
if [ "$skipped" -gt 0 ]; then
  grep -A3 -E '^ *--- SKIP' out/test.log
  if [ "${FARED_REQUIRE_ALL:-}" = 1 ]; then
    echo "a skipped test is a failure here (FARED_REQUIRE_ALL=1)"
    code=1
  fi
fi
if [ "$passed" -eq 0 ]; then
  echo "no test ran"
  code=1
fi
if [ $code -ne 0 ]; then
  echo "--- what failed, from out/test.log"
  grep -B40 -E '^ *--- FAIL|^panic:|^FAIL' out/test.log | cut -c1-400 | tail -200
fi
echo "$passed passed, $failed failed, $skipped skipped"
exit $code
