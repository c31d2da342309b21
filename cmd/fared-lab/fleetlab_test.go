package main

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestFleetOfNamespaces names faults of eight servers behind leaves with FRR, in network namespaces: half a cable, a
// port, a leaf without links, and a leaf that forwards nothing while its sessions are up.
func TestFleetOfNamespaces(t *testing.T) {
	gate.Slow(t, gate.Labs, "eight servers in namespaces")
	fabric := []string{"--servers", "8", "--planes", "4", "--leaf", "frr"}
	lab := testbed.NewLab(t, fabric...)
	start(t, append([]string{"fleet", "worker"}, fabric...)...)
	for i := range 8 {
		cmd := exec.Command(binary.Fared(t), "--socket", lab.Socket(fmt.Sprintf("server%d", i+1)), "report", "--worker", defaultWorker)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	}
	named := func(want string) {
		t.Helper()
		begun := time.Now()
		within(t, generous, func() error {
			var fleet struct {
				ServersReporting int `json:"servers_reporting"`
				Faults           []struct{ Part, Fault string }
			}
			o := fared(t, "fleet", "faults", "-o", "json")
			if o.Code != 0 {
				return fmt.Errorf("exit %d: %s", o.Code, o.Err)
			}
			if err := json.Unmarshal([]byte(o.Out), &fleet); err != nil {
				return err
			}
			got := ""
			for _, f := range fleet.Faults {
				got += f.Part + " " + f.Fault + ";"
			}
			if fleet.ServersReporting != 8 || got != want {
				return fmt.Errorf("%d servers report, faults %q, want %q", fleet.ServersReporting, got, want)
			}
			return nil
		})
		t.Logf("%q after %s", want, time.Since(begun).Round(time.Millisecond))
	}
	named("")
	lab.Node("server2").IP("link", "set", "p1.0", "down")
	named("server2/p1.0 dark;")
	lab.Node("server2").IP("link", "set", "p1.1", "down")
	named("server2/p1 dark;")
	lab.Node("server2").IP("link", "set", "p1.0", "up")
	lab.Node("server2").IP("link", "set", "p1.1", "up")
	named("")
	lab.SetLeaf("leaf0", "down")
	named("leaf0 dark;")
	lab.SetLeaf("leaf0", "up")
	named("")
	if out, err := lab.Node("leaf2").Output("nft", "add table inet quiet; add chain inet quiet eater { type filter hook forward priority 0; policy drop; }"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	named("leaf2 loss;")
}
