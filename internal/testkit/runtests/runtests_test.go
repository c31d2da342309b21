package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// declared scans the package of testdata.
func declared(t *testing.T) pkg {
	t.Helper()
	pkgs, err := scan([]string{"./testdata/declared"})
	if err != nil || len(pkgs) != 1 {
		t.Fatalf("%d packages, %v", len(pkgs), err)
	}
	return pkgs[0]
}

func TestScan(t *testing.T) {
	p := declared(t)
	want := []test{
		{name: "Example"},
		{name: "TestLacks"},
		{name: "TestPlain", plain: true},
		{name: "TestQuick"},
		{name: "TestSlow", slow: []gate.Part{gate.Packets}},
		{name: "TestVariants", slow: []gate.Part{gate.Kernel, gate.Models}, needed: true},
	}
	equal := func(a, b test) bool {
		return a.name == b.name && slices.Equal(a.slow, b.slow) && a.needed == b.needed && a.plain == b.plain
	}
	if !slices.EqualFunc(p.tests, want, equal) {
		t.Errorf("got  %+v\nwant %+v", p.tests, want)
	}
	if p.path != "internal/testkit/runtests/testdata/declared" || p.facts != (gate.Package{Computes: "waits for no timer", HostNetwork: "a port of the host"}) {
		t.Errorf("%+v", p)
	}
}

func TestScanRefuses(t *testing.T) {
	_, err := scan([]string{"./testdata/wrong"})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"wrong_test.go:10:38: Computes is a reason in a string literal",
		"wrong_test.go:11:6: a second gate.Package",
		"wrong_test.go:16:29: gate.Slow stands outside of a test function",
		"wrong_test.go:19:2: gate.Slow names its part by a constant",
		"wrong_test.go:20:2: the package declares NoGoroutine and starts a goroutine here",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in:\n%v", want, err)
		}
	}
	if n := strings.Count(err.Error(), "\n") + 1; n != 5 {
		t.Errorf("%d errors:\n%v", n, err)
	}
}

func TestPlan(t *testing.T) {
	p := declared(t)
	for _, c := range []struct {
		name     string
		facts    gate.Package
		parts    []gate.Part
		detector bool
		want     string
	}{
		{"gate", gate.Package{}, nil, true, "race skip=^(TestPlain)$; plain run=^(TestPlain)$"},
		{"gate without a compiler", gate.Package{}, nil, false, "plain"},
		{"no goroutine", gate.Package{NoGoroutine: true}, nil, true, "plain"},
		{"other processes", gate.Package{WithoutRaceDetector: "drives other processes"}, nil, true, "plain"},
		{"one part", gate.Package{}, []gate.Part{gate.Packets}, true, "race run=^(TestSlow)$"},
		{"two parts", gate.Package{}, []gate.Part{gate.Kernel, gate.Packets}, true, "race run=^(TestSlow|TestVariants)$"},
		{"a part without tests", gate.Package{}, []gate.Part{gate.VM}, true, ""},
	} {
		p.facts = c.facts
		var got []string
		for _, j := range plan([]pkg{p}, c.parts, c.detector) {
			words := []string{"plain"}
			if j.race {
				words[0] = "race"
			}
			if j.run != "" {
				words = append(words, "run="+j.run)
			}
			if j.skip != "" {
				words = append(words, "skip="+j.skip)
			}
			got = append(got, strings.Join(words, " "))
		}
		if s := strings.Join(got, "; "); s != c.want {
			t.Errorf("%s: %s, want %s", c.name, s, c.want)
		}
	}
}

func TestLongJobsAreFirst(t *testing.T) {
	pkgs := []pkg{
		{path: "a", tests: []test{{name: "TestA"}}},
		{path: "b", tests: []test{{name: "TestB", needed: true}, {name: "TestC", slow: []gate.Part{gate.Models}}}},
		{path: "c", tests: []test{{name: "TestD", needed: true}, {name: "TestE", needed: true}}},
	}
	var got []string
	for _, j := range plan(pkgs, nil, false) {
		got = append(got, j.pkg.path)
	}
	if want := []string{"c", "b", "a"}; !slices.Equal(got, want) {
		t.Errorf("the order is %v, want %v", got, want)
	}
}

func TestBatchesHaveEachNameOnce(t *testing.T) {
	jobs := []job{{pkg: pkg{path: "a/gen"}}, {pkg: pkg{path: "b/gen"}}, {pkg: pkg{path: "c"}, race: true}, {pkg: pkg{path: "d"}}}
	got := batches(jobs, false)
	if len(got) != 2 || len(got[0]) != 2 || len(got[1]) != 1 || got[1][0].pkg.path != "b/gen" {
		t.Errorf("%+v", got)
	}
}

// TestRun builds and runs the package of testdata as the gate does, and as a part does.
func TestRun(t *testing.T) {
	gate.WithoutRaceDetector(t, "builds and runs another binary")
	p := declared(t)
	for _, c := range []struct {
		parts                 []gate.Part
		passed, lacking, left int
	}{
		{nil, 5, 1, 2},                       // TestQuick, TestPlain, Example, TestVariants and one of its subtests
		{[]gate.Part{gate.Packets}, 1, 0, 0}, // TestSlow
		{[]gate.Part{gate.Kernel}, 3, 0, 0},  // TestVariants with both
	} {
		r := runner{folder: t.TempDir(), parts: c.parts, out: t.Output()}
		jobs := plan([]pkg{p}, c.parts, false)
		if err := build(jobs, r.folder); err != nil {
			t.Fatal(err)
		}
		results, err := r.runAll(t.Context(), jobs)
		if err != nil {
			t.Fatal(err)
		}
		v := sum(results)
		left := 0
		for _, names := range v.left {
			left += len(names)
		}
		if v.passed != c.passed || v.failed != 0 || len(v.lacking) != c.lacking || left != c.left {
			t.Errorf("parts %v: %+v", c.parts, v)
		}
	}
}

func TestRead(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(log, []byte("\x16=== RUN   TestA\n    a_test.go:1: text\n\x16--- PASS: TestA (1.25s)\n\x16=== NAME  \nPASS\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	res, err := read(log)
	if err != nil || res.failed || len(res.tests) != 1 || res.tests[0].elapsed != 1250*time.Millisecond || len(res.tests[0].output) != 2 {
		t.Errorf("%+v, %v", res, err)
	}
}

// events of a run with every outcome, as test2json writes them.
const events = `{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Test":"TestA","Output":"    a_test.go:7: wrong\n"}
{"Action":"fail","Test":"TestA","Elapsed":6.5}
{"Action":"run","Test":"TestB"}
{"Action":"run","Test":"TestB/IPv6"}
{"Action":"output","Test":"TestB/IPv6","Output":"    b_test.go:9: slow, part kernel: the other family (FARED_PARTS=kernel runs it)\n"}
{"Action":"skip","Test":"TestB/IPv6","Elapsed":0}
{"Action":"pass","Test":"TestB","Elapsed":7}
{"Action":"run","Test":"TestC"}
{"Action":"output","Test":"TestC","Output":"    c_test.go:9: birdc is not installed\n"}
{"Action":"skip","Test":"TestC","Elapsed":0}
{"Action":"run","Test":"TestD"}
{"Action":"output","Output":"panic: test timed out\n"}
{"Action":"output","Output":"goroutine 1 [running]:\n"}
{"Action":"fail"}
`

func TestReport(t *testing.T) {
	res, err := parse([]byte(events))
	if err != nil {
		t.Fatal(err)
	}
	res.job = job{pkg: pkg{path: "p"}, tests: []test{{name: "TestA"}, {name: "TestB", needed: true}, {name: "TestC"}, {name: "TestD"}}}
	res.log = "p.test.log"
	v := sum([]result{res})
	var out strings.Builder
	v.print(&out)
	failures(&out, []result{res})
	v.total(&out, "gate", 90*time.Second)
	want := `left out, 1 for make test-slow PARTS=kernel: p.TestB/IPv6
slowest:
     7.0s  p.TestB
     6.5s  p.TestA
     0.0s  p.TestC
     0.0s  p.TestD
outgrown: p.TestA 6.5s is above 5s: make it quicker, declare it gate.Slow, or gate.Needed with the reason
skipped: p.TestC: birdc is not installed
--- p.TestA failed (p.test.log)
        a_test.go:7: wrong
--- p.TestD failed (p.test.log)
--- p (p.test.log)
    panic: test timed out
    goroutine 1 [running]:
gate: 1 passed, 2 failed, 1 skipped in 90 s
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestParts(t *testing.T) {
	if parts, err := parseParts("packets kernel"); err != nil || !slices.Equal(parts, []gate.Part{gate.Packets, gate.Kernel}) {
		t.Error(parts, err)
	}
	if parts, err := parseParts("all"); err != nil || len(parts) != len(gate.Parts()) {
		t.Error(parts, err)
	}
	if _, err := parseParts("packet"); err == nil || !strings.Contains(err.Error(), `there is no part "packet"; the parts are containers labs`) {
		t.Error(err)
	}
}

// TestOwnNetwork verifies that a command in a network namespace of its own has the loopback device, up, and no other
// device that is up.
func TestOwnNetwork(t *testing.T) {
	words := ownNetwork()
	if words == nil {
		netnstest.Lacks(t, "the privilege to make a network namespace, unshare or ip")
	}
	args := append(slices.Clone(words), "ip", "-o", "link", "show", "up") // modules of tunnels add devices that are down
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if lines := strings.Fields(string(out)); err != nil || strings.Count(string(out), "\n") != 1 || lines[1] != "lo:" {
		t.Errorf("%v: %s", err, out)
	}
}
