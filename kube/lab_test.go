package kube

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/client"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestLab cuts cables of a server in namespaces, next to a real daemon: half a Y-cable, a leaf, and their return. Each
// arrives at the API server and at NVSentinel; half a cable taints nothing. A cordon drains all planes but the last.
func TestLab(t *testing.T) {
	gate.Slow(t, gate.Labs, "a fabric in network namespaces")
	l := testbed.NewLab(t, "--planes", "4", "--servers", "2")
	l.AwaitWeights("server1", "1:1:1:1", 1)
	conn, err := client.Dial(l.Socket("server1"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	api, server := serveAPI(t)
	events, calls := serveSentinel(t)
	var c clock
	a := start(t, Options{Daemon: conn, API: server, Labels: true, Drains: true, DrainCordoned: true, Taints: "dra.net", TaintEffect: "NoSchedule", Sentinel: events, Now: c.now})
	half := ""
	for line := range strings.Lines(l.Node("server1").IP("-br", "link")) {
		if device, _, _ := strings.Cut(strings.Fields(line)[0], "@"); device != "lo" {
			half = device // of the last plane
		}
	}
	for _, step := range []struct {
		do           func()
		planes, said string
	}{
		{func() {}, "4/4 AllPlanesUp False 4 2 []", "plane p2 is up"},
		{func() { l.Node("server1").IP("link", "set", half, "down") }, "3.5/4 CablesDown False 4 2 []", "3.5/4 planes remain, 87.5 %"},
		{func() { l.SetLeaf("leaf0", "down") }, "2.5/4 PlanesDown False 3 2 []", "plane p0 is down; 2.5/4 planes remain"},
		{func() {
			l.Node("server1").IP("link", "set", half, "up")
			l.SetLeaf("leaf0", "up")
		}, "4/4 AllPlanesUp False 4 2 []", "plane p0 is up"},
	} {
		begin := time.Now()
		step.do()
		api.shows(t, "the planes", step.planes, api.planes)
		shown := time.Since(begin)
		said := ""
		for !strings.Contains(said, step.said) {
			said = <-calls
		}
		t.Logf("%s: shown after %v", step.planes, shown.Round(time.Millisecond))
	}
	cordon := func(on bool, want string) {
		t.Helper()
		api.do(func() {
			api.cordoned = on
			api.touch()
		})
		api.shows(t, "the drains", want, func() string {
			c.nextHour(a)
			text := ""
			status, _ := api.state["status"].(map[string]any)
			drains, _ := status["drains"].([]any)
			for _, x := range drains {
				d := x.(map[string]any)
				refusal, _ := d["error"].(string)
				text += fmt.Sprint(d["target"], " ", d["stage"], " ", strings.Contains(refusal, "by p3 now"), "; ")
			}
			return text
		})
	}
	cordon(true, "plane/p0 drained false; plane/p1 drained false; plane/p2 drained false; plane/p3 <nil> true; ")
	l.AwaitWeights("server1", "0:0:0:1", 1)
	cordon(false, "")
	l.AwaitWeights("server1", "1:1:1:1", 1)
}
