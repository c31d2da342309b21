#!/usr/bin/env bash
# Runs every test and prints the packages, the failures and the skips. make lint runs vet, so go test does not. The whole log is in out/test.log.
# With FARED_REQUIRE_ALL=1 a skipped test is a failure. Up to five tests that fail beside others run once more, alone (docs/testing.md, "Second attempts").
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
module=$(go list -m)
# Chaos runs for two minutes, next to the other packages, on GPUs with ports of their own, both address families, and leaves of fared, FRR and BIRD.
export FARED_CHAOS_MINUTES=${FARED_CHAOS_MINUTES:-2} FARED_CHAOS_FABRIC=${FARED_CHAOS_FABRIC:-mixed}

# Packages that start no goroutine run without the race detector, at their full number of cases.
pure="fare wecmp topo daemon/config daemon/internal/core daemon/internal/guard"
for p in $pure; do
  if grep -nE '^\s*(defer )?go (func|[a-z])' "$p"/*.go | grep -v '_test\.go:'; then
    echo "test: $p starts a goroutine: remove it from the packages without the race detector in scripts/test.sh" >&2
    exit 1
  fi
done

# Packages without a goroutine, even in their tests, and those whose tests drive programs of C. They run without it, too.
sequential="client/slots cmd/fared/internal/netsetup daemon/config/internal/gen daemon/internal/drainfile internal/deptest internal/linkpoll internal/mutate internal/plainfile
  internal/prefixmap internal/prose internal/rdmadev internal/rdmaenv internal/slotlayout/gen internal/spelling internal/vex lab/judge monitoring monitoring/gen
  transport/internal/congestion transport/internal/rtt transport/roce"
drives_c="lib lib/nccl lib/softdev lib/verbs examples/pytorch"
for p in $sequential; do
  if grep -nE '^\s*(defer )?go (func|[a-z])|\.Go\(' "$p"/*.go; then
    echo "test: $p starts a goroutine: remove it from the packages without one in scripts/test.sh" >&2
    exit 1
  fi
done

# Tests of one goroutine in packages that otherwise need the race detector, which makes each of them about ten times slower; some that judge the memory of
# processes, which it multiplies; and those with a Prometheus, a transfer or a fabric of namespaces, which drive dozens of processes. They run without it.
single="TestPlansReachTheDesiredState TestLayoutKeepsItsPromises TestPagesLikeSortedMap TestBatchesEqualOneByOne TestReloadEqualsAFreshStart
  TestEvacuationAgainstThePackets TestFloodIsLinear TestRoCEChannels TestRoCERefusals TestRoCEStall TestRoCEIncast TestRoCEReadsFillALink TestRoCEShares TestRoCESets TestRoCEBlindSets
  TestSUPERpChannels TestSUPERpRefusals TestSUPERpStall TestSUPERpIncast TestSUPERpShares TestSUPERpSets TestSUPERpBlindSets
  TestPromptDelayIsBounded TestBulkChangeIsOneOperation TestDampingEqualsItsModel TestRecordingSurvivesAFullDisk TestModelOnStreams TestConnectionFlood
  TestPrometheus TestPrometheusQuiet TestPrometheusFaults TestPrometheusFlaps TestPrometheusAgent TestPrometheusFaultyDaemon TestTransfer TestKeepReturnsGarbage
  TestFlushesSuffice TestFlushesAreNeeded TestRestartsAndPauses TestHostileLines TestTransferInScenarios TestTransportsTogether TestNetnsDefaults TestNetnsTimeline TestLabTransfer TestLabNetnsJSON TestLabNetnsLines TestLabNetnsCleanup"
# shellcheck disable=SC2086 # one word a test
single_pattern="^($(printf '%s|' $single | sed 's/|$//'))\$"
single_packages="transport/internal/mailbox dataplane/linux daemon/internal/status dataplane/internal/contract daemon daemon/internal/dpclient transport/rdma/rdmatest transport/tcpqp internal/footprint cmd/fared lab"

# packages NAME...: their import paths.
packages() { for p in "$@"; do echo "$module/$p"; done; }

# Two jobs at once: more of them delay each other by seconds on two processors, so that timers of protocols expire, and end no sooner.
#
# The first has no race detector: labs in containers, tests that drive other processes alone, with code that other packages run under the detector, and the labs of
# all scenarios in one process and in namespaces.
processes="interop/packets interop/chaos interop interop/hostile interop/nupa interop/peers systemd"
(
  failed=0
  go test -vet=off -count=1 -timeout 80m -v ./containerlab >out/containers.log 2>&1 || failed=1
  # shellcheck disable=SC2046,SC2086 # one word a package
  go test -vet=off -count=1 -p 1 -timeout 80m -v $(packages $processes) >out/processes.log 2>&1 || failed=1
  go test -vet=off -count=1 -timeout 80m -v -run '^Test(NetnsScenarios|BuiltInScenarios)$' ./lab >>out/processes.log 2>&1 || failed=1
  exit $failed
) &
others=$!

# The second has it, and two packages at a time, because many tests wait for timers of a protocol. Those that take longest come first.
first=$(packages lab cmd/fared daemon/internal/speaker dataplane/linux dataplane/bpf daemon daemon/internal/status)
rest=$(go list ./... | grep -vxF "$first" | grep -vxF "$(packages containerlab $processes $pure $sequential $drives_c)") || exit 1
# shellcheck disable=SC2086 # one word a package
go test -race -vet=off -p "$(($(nproc) > 4 ? $(nproc) / 2 : 2))" -count=1 -timeout 80m -v -skip "$single_pattern" $first $rest >out/race.log 2>&1
code=$?

# After it, without the detector: packages that it finds nothing in, and tests that it makes too slow to be complete.
(
  failed=0
  # shellcheck disable=SC2046,SC2086 # one word a package
  go test -vet=off -count=1 -p 2 -timeout 80m -v $(packages $drives_c $sequential) || failed=1
  # shellcheck disable=SC2046,SC2086 # one word a package
  FARED_MUTATIONS=1500000 go test -vet=off -count=1 -p 1 -timeout 80m -v $(packages $pure) || failed=1
  # shellcheck disable=SC2046,SC2086 # one word a package
  FARED_OPERATIONS=500000 go test -vet=off -count=1 -p 1 -timeout 80m -v -run "$single_pattern" $(packages $single_packages) || failed=1
  FARED_OPERATIONS=500000 go test -vet=off -count=1 -p 1 -timeout 80m -v -run 'TestMillion|TestTCPUnderLoss' ./interop/transports || failed=1
  exit $failed
) >out/plain.log 2>&1 || code=1
wait $others || code=1
cat out/race.log out/plain.log out/processes.log out/containers.log >out/test.log

# failures LOG...: a line "PACKAGE TEST" for each test that failed, "PACKAGE -" for each package that failed without one.
failures() { awk '/^--- FAIL: / { test[n++] = $3 } /^(ok  |FAIL)\t/ { if ($1 == "FAIL") { if (n == 0) print $2, "-"; for (i = 0; i < n; i++) print $2, test[i] } n = 0 }' "$@"; }

# messages prints those of each failed test, by its name in the lines === RUN and === NAME: four lines of each, because the text of a process after a message is
# long, and the first and last messages, because a test ends with its failure or with the logs of its processes. Then crashes.
messages() {
  awk '
    NR == FNR { if ($1 == "---" && $2 == "FAIL:") failed[$3] = 1; next }
    $1 == "===" { test = $3; next }
    $1 == "---" || /^(ok|FAIL|PASS)/ { test = ""; next }
    test in failed {
      if ($0 ~ /^ *[a-zA-Z0-9_]+\.go:[0-9]+: /) lines[test] = 0
      if (lines[test]++ < 4) printed[test, count[test]++] = $0
    }
    END {
      for (t in failed) {
        print "=== " t
        for (i = 0; i < count[t]; i++) if (i < 8 || i >= count[t] - 8) print printed[t, i]
      }
    }' out/test.log out/test.log | cut -c1-300
}

# Two jobs share the processors, and protocols have timers: a test that fails beside others gets a second attempt alone, and says so. A fault fails twice. Crashes, data
# races, and more failures than machines explain get none.
second=0
if [ $code -ne 0 ]; then
  all=$(failures out/race.log out/plain.log out/processes.log out/containers.log)
  if [ -n "$all" ] && [ "$(wc -l <<<"$all")" -le 5 ] && ! grep -q ' -$' <<<"$all" && ! grep -qE '^(panic:|fatal error:|WARNING: DATA RACE)' out/test.log; then
    code=0
    : >out/second.log
    for log in race plain processes containers; do
      while read -r package test; do
        echo "$test of $package failed beside other tests; once more, alone"
        detector=()
        [ "$log" = race ] && detector=(-race)
        FARED_MUTATIONS=1500000 FARED_OPERATIONS=500000 go test "${detector[@]}" -vet=off -count=1 -timeout 80m -v -run "^$test\$" "$package" >>out/second.log 2>&1 </dev/null || code=1
      done < <(failures "out/$log.log")
    done
    if [ $code -eq 0 ]; then
      second=$(wc -l <<<"$all")
      echo "--- what failed at the first attempt, from out/test.log"
      messages
      sed -E -i 's/^( *)--- FAIL:/\1--- first attempt failed:/; s/^FAIL\t/first attempt failed\t/; s/^FAIL$//' out/test.log
    fi
    cat out/second.log >>out/test.log
  fi
fi

grep -E '^(ok|FAIL|first attempt failed|panic:|\?)|^(---|    ---) (FAIL|first attempt)|no test files' out/test.log | grep -v 'no test files'
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
for test in $single; do
  if ! grep -qE "^--- (PASS|FAIL|SKIP): $test " out/test.log; then
    echo "$test, which scripts/test.sh names, has not run"
    code=1
  fi
done
# A package or a pattern above that no longer matches a test must not pass for one.
if [ "$passed" -eq 0 ] || grep -B1 -A1 'testing: warning: no tests to run' out/test.log; then
  echo "a test run that found no test is a failure"
  code=1
fi
if [ $code -ne 0 ]; then
  echo "--- what failed, from out/test.log"
  messages
  grep -A30 -E '^(panic:|fatal error:|WARNING: DATA RACE)' out/test.log | cut -c1-400 | head -100
fi
echo "$passed passed, $failed failed, $skipped skipped, $second of the tests at the second attempt"
exit $code
