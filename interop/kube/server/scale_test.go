package server

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/kube/pacer"
)

// counted counts the changes of each object of a watch. The first event of an object is no change.
type counted struct {
	mu    sync.Mutex // guards the fields below
	count map[string]int
	last  map[string]string // planesUsable
}

// follow counts until ctx ends. The server ends streams of clients that are slow, and refuses them for a moment when it
// has just got the CRD, and connections of a busy one fail: the next stream resumes after the last event, so that none
// is lost, unless the server has forgotten it.
func (x *counted) follow(ctx context.Context, c *cluster, path string) {
	version := ""
	for ctx.Err() == nil {
		err := c.admin.Watch(ctx, path+"?watch=true&timeoutSeconds=3600&resourceVersion="+version, func(kind string, text json.RawMessage) (err error) {
			version, err = x.add(kind, text)
			return err
		})
		if err != nil && strings.Contains(err.Error(), "too old resource version") {
			c.t.Errorf("the watch of %s: %v", path, err)
			return
		}
	}
}

// add counts an event, and returns its version.
func (x *counted) add(kind string, text json.RawMessage) (version string, err error) {
	var o struct {
		Metadata struct{ Name, ResourceVersion string }
		Status   struct{ PlanesUsable string }
	}
	if err := json.Unmarshal(text, &o); err != nil {
		return "", err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if kind == "MODIFIED" {
		x.count[o.Metadata.Name]++
	}
	x.last[o.Metadata.Name] = o.Status.PlanesUsable
	return o.Metadata.ResourceVersion, nil
}

// all waits until all nodes are shown with these planes. A server with one processor writes some hundred a second.
func (x *counted) all(t *testing.T, nodes int, want string) {
	t.Helper()
	within(t, max(3*time.Minute, time.Duration(nodes)*time.Second/2), func() error {
		x.mu.Lock()
		defer x.mu.Unlock()
		n := 0
		for _, last := range x.last {
			if last == want {
				n++
			}
		}
		if n != nodes {
			return fmt.Errorf("%d of %d nodes are shown with %s planes", n, nodes, want)
		}
		return nil
	}, func() string { return "" })
}

// TestScale runs an agent for each of 256 nodes while a leaf of all flaps at 1 Hz for 20 s: no node has more
// writes than a burst and one every twelve seconds, and each has the last state in the end. FARED_KUBE_NODES and
// FARED_KUBE_SECONDS are other numbers.
func TestScale(t *testing.T) {
	nodes, seconds := setting(t, "FARED_KUBE_NODES", 256), setting(t, "FARED_KUBE_SECONDS", 20)
	c := newCluster(t)
	c.must(http.MethodDelete, bindings+"/fared-"+namespace, nil, nil) // one account writes for all nodes
	c.node("gpu-all")
	c.pod("gpu-all")
	d := newDaemon()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	writes := map[string]*counted{states: nil, "/api/v1/nodes": nil}
	for path := range writes {
		x := &counted{count: map[string]int{}, last: map[string]string{}}
		writes[path] = x
		running.Go(func() { x.follow(ctx, c, path) })
	}
	begin := time.Now()
	for i := range nodes {
		name := fmt.Sprintf("gpu-%d", i)
		c.node(name)
		c.run(name, d, &running, ctx, "")
	}
	writes[states].all(t, nodes, "2/2")
	t.Logf("%d nodes are shown after %v", nodes, time.Since(begin).Round(time.Second))
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for i := range seconds {
		if i%2 == 0 {
			d.set("p1.0", "p1.1")
		} else {
			d.set()
		}
		<-second.C
	}
	d.set("p0.0")
	end := time.Now()
	writes[states].all(t, nodes, "1.5/2")
	took := time.Since(end)
	all := time.Since(begin)
	most := judge(t, writes, nodes, pacer.Burst+int(all/pacer.Refill))
	statesAlone := judge(t, map[string]*counted{states: writes[states]}, nodes, pacer.Burst+int(all/pacer.Refill))
	var list struct {
		Items []struct{ Status struct{ PlanesUsable string } }
	}
	c.must(http.MethodGet, states, nil, &list)
	for _, o := range list.Items {
		if o.Status.PlanesUsable != "1.5/2" {
			t.Errorf("a last state is lost: %+v", o)
		}
	}
	t.Logf("%d nodes, %v: at most %d writes of a node, %d of its FaredNodeState (%.3f a second); the last state is shown after %v",
		nodes, all.Round(time.Second), most, statesAlone, float64(statesAlone)/all.Seconds(), took.Round(time.Second))
}

// judge checks that no node has more writes than are allowed, and returns the greatest number.
func judge(t *testing.T, writes map[string]*counted, nodes, allowed int) (most int) {
	t.Helper()
	for i := range nodes {
		n := 0
		for _, x := range writes {
			x.mu.Lock()
			n += x.count[fmt.Sprintf("gpu-%d", i)]
			x.mu.Unlock()
		}
		if most = max(most, n); n > allowed {
			t.Errorf("node %d has %d writes, %d are allowed", i, n, allowed)
		}
	}
	return most
}

// setting returns a number of the environment.
func setting(t *testing.T, name string, standard int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return standard
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}
