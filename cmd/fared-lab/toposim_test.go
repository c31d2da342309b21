package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
)

// TestSimulateBroken checks that a broken rule of conservation ends with exit code 1, and that the result is still
// printed.
func TestSimulateBroken(t *testing.T) {
	args := []string{"topo", "simulate", "--example", "two-tier", "--leaf", "frr", "--fail", "server2/p1.0"}
	o := fared(t, args...)
	for _, want := range []string{
		"1:1      8\n2:1      4\n", "\nserver2             1      900G    1.2T   75.00 %\n",
		"\nplane: server3 to server2 in p1: weight 1 of [1 1], for 400G of 1.2T (and 1 pairs like it)\n",
	} {
		if !strings.Contains(o.Out, want) {
			t.Errorf("no %q in\n%s", want, o.Out)
		}
	}
	const why = "fared: rules of conservation are broken in 1 of 1 cases\n  /usr/share/doc/fared/topo.md, section Simulation, explains the rules\n"
	if o.Code != cli.ExitFailed || o.Err != why {
		t.Errorf("exit %d, %q", o.Code, o.Err)
	}
	o = fared(t, append(args, "-o", "json")...)
	var got struct{ Cases []simulated }
	if err := json.Unmarshal([]byte(o.Out), &got); err != nil {
		t.Fatal(err)
	}
	if o.Code != cli.ExitFailed || len(got.Cases) != 1 || len(got.Cases[0].Violations) != 9 || got.Cases[0].Fairness.Worst.Server != "server2" {
		t.Errorf("exit %d: %s", o.Code, o.Out)
	}
	o = fared(t, "topo", "simulate", "--example", "two-tier", "--leaf", "frr", "--all-single")
	if want := "\n46 cases, rules of conservation are broken in 46."; o.Code != cli.ExitFailed || !strings.Contains(o.Out, want) {
		t.Errorf("exit %d: no %q in\n%s", o.Code, want, o.Out)
	}
}

// TestSimulateTwoTier checks that leaves with fared break no rule under any single failure.
func TestSimulateTwoTier(t *testing.T) {
	for _, spine := range []string{"fared", "frr"} {
		o := fared(t, "topo", "simulate", "--example", "two-tier", "--spine", spine, "--all-single") // a busy machine prints progress on standard error
		if want := "\n46 cases, rules of conservation are broken in 0."; o.Code != cli.ExitOK || !strings.Contains(o.Out, want) {
			t.Errorf("spines with %s: exit %d, no %q in\n%s%s", spine, o.Code, want, o.Out, o.Err)
		}
	}
	want := "\n1:2      8\n1:1      4\n"
	if out := must(t, "topo", "simulate", "--example", "two-tier", "--fail", "spine0-0"); !strings.Contains(out, want) {
		t.Errorf("no %q in\n%s", want, out)
	}
}
