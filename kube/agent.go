// Package kube is the program fared-kube: it shows the planes of a node to Kubernetes and to NVSentinel. It reads the
// daemon's API as any other client, in a separate process: whatever an API server does, the daemon does not wait.
package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/kube/nodestate"
	"github.com/fared/fared/kube/pacer"
	"github.com/fared/fared/kube/sentinel"
)

const (
	// silence is the time without an answer of the daemon after which conditions are unknown, longer than a restart.
	silence = time.Minute
	// resync is the period in which all objects are written again, should another program have changed them.
	resync = 10 * time.Minute
)

// Options are an agent's. All but Taints, Sentinel, AtShutdown and Now must be set.
type Options struct {
	Node, Version string
	Daemon        grpc.ClientConnInterface
	API           *apiserver.Client
	// UnusableBelow is the share of planes, in percent, below which the node has the condition PlanesUnusable.
	UnusableBelow int
	Labels        bool
	// Drains makes the drains of the node's annotations and FaredDrains, DrainCordoned those of a cordoned node's
	// planes. Daemon needs the right to operate.
	Drains, DrainCordoned bool
	// AtShutdown is the file that exists from the node's shutdown until its planes are drained; empty disables that.
	AtShutdown string
	// Taints is the driver whose devices are tainted, TaintEffect the effect; an empty driver disables taints.
	Taints, TaintEffect string
	// Sentinel, if not nil, receives health events.
	Sentinel *sentinel.Client
	Log      *slog.Logger
	// Sys is the mount point of sysfs.
	Sys string
	// Now returns the time by which writes are paced; nil means time.Now.
	Now func() time.Time
}

// Agent shows the planes of one node.
type Agent struct {
	Options
	uid          atomic.Pointer[string] // of the Node
	observations atomic.Uint64

	taints tainter
	api    *sink
	health *sink
	sent   map[string]nodestate.Health // of the health sink's goroutine: the last events, by entity

	// drainsSent has the last statuses of FaredDrains, by UID; of the API sink's goroutine.
	drainsSent map[string]string

	observed chan nodestate.Observation
	nodes    chan node
	objects  chan []FaredDrain
	wishes   chan wishes // to the drainer; the last ones
	outcomes chan drainReport
	// Of the loop's goroutine.
	last        *nodestate.Observation
	wished      wishes
	outcome     drainReport
	state       *nodestate.State
	transitions map[string]condition
	known       bool // the node
}

// New returns an agent that does not run.
func New(o Options) *Agent {
	if o.Now == nil {
		o.Now = time.Now
	}
	a := &Agent{
		Options: o, observed: make(chan nodestate.Observation), nodes: make(chan node),
		objects: make(chan []FaredDrain), wishes: make(chan wishes, 1), outcomes: make(chan drainReport),
		transitions: map[string]condition{}, sent: map[string]nodestate.Health{},
		taints: tainter{api: o.API, node: o.Node, driver: o.Taints, effect: o.TaintEffect, sys: o.Sys},
	}
	a.api = newSink("API server", o.Log, o.Now, a.writeAPI)
	a.health = newSink("NVSentinel", o.Log, o.Now, a.writeHealth)
	return a
}

// Run shows the node's planes until ctx ends. It is called once.
func (a *Agent) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { a.api.run(ctx) })
	running.Go(func() { a.health.run(ctx) })
	running.Go(func() { followDaemon(ctx, a.Daemon, send(ctx, a.observed)) })
	running.Go(func() { a.followNode(ctx, send(ctx, a.nodes)) })
	d := drainer{Options: &a.Options, client: farev1.NewFabricServiceClient(a.Daemon), named: map[string]string{}}
	if a.Drains || a.DrainCordoned || a.AtShutdown != "" {
		running.Go(func() { d.run(ctx, a.wishes, send(ctx, a.outcomes)) })
	}
	if a.Drains {
		running.Go(func() { a.followDrains(ctx, send(ctx, a.objects)) })
	}
	a.loop(ctx)
	running.Wait()
	if a.AtShutdown != "" && a.wished.node.leaves() {
		d.leave(a.AtShutdown)
	}
}

// send returns a function that sends to a channel until ctx ends.
func send[T any](ctx context.Context, to chan<- T) func(T) {
	return func(v T) {
		select {
		case to <- v:
		case <-ctx.Done():
		}
	}
}

// loop owns the agent's state.
func (a *Agent) loop(ctx context.Context) {
	silent, again := time.NewTimer(silence), time.NewTicker(resync)
	defer silent.Stop()
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case o := <-a.observed:
			silent.Reset(silence)
			a.observations.Add(1)
			a.last = &o
			a.publish()
		case a.outcome = <-a.outcomes:
			a.publish()
		case a.wished.objects = <-a.objects:
			a.wished.known = true
			a.wish()
		case n := <-a.nodes:
			a.meet(n)
		case <-silent.C:
			a.last, a.state = nil, nil
			a.publishConditions()
		case <-again.C:
			a.api.refresh()
		}
	}
}

// meet takes note of the node: its first conditions keep their times, and changes by other programs are overwritten.
func (a *Agent) meet(n node) {
	a.uid.Store(&n.Metadata.UID)
	a.wished.node = &n
	a.wish()
	a.markShutdown()
	if !a.known {
		a.known = true
		for _, c := range n.Status.Conditions {
			a.transitions[c.Type] = c
		}
		a.publish()
		return
	}
	if a.state == nil {
		return
	}
	for _, c := range n.Status.Conditions {
		if (c.Type == nodestate.PlanesDegraded || c.Type == nodestate.PlanesUnusable) && c.Condition != a.transitions[c.Type].Condition {
			a.api.refresh(keyConditions)
		}
	}
	for key, value := range a.state.Labels() {
		if a.Labels && n.Metadata.Labels[key] != value {
			a.api.refresh(keyLabels)
		}
	}
}

// wish gives the wishes to the drainer, in place of earlier ones that it has not read.
func (a *Agent) wish() {
	select {
	case <-a.wishes:
	default:
	}
	a.wishes <- a.wished
}

// publish gives the state to the sinks.
func (a *Agent) publish() {
	if a.last == nil || !a.known {
		return
	}
	a.state = nodestate.Of(*a.last, a.outcome.refused, a.Version)
	var urgent strings.Builder
	for _, p := range a.state.Planes {
		fmt.Fprintln(&urgent, p.Name, p.State, p.BandwidthBps)
	}
	a.api.want(keyState, pacer.Object{Body: string(encode(a.state)), Urgent: urgent.String()})
	a.publishConditions()
	if a.Drains {
		a.publishDrains()
	}
	if a.Labels {
		body := labelsBody(a.Node, a.state.Labels())
		a.api.want(keyLabels, pacer.Object{Body: body, Urgent: body})
	}
	if a.Taints != "" {
		body := string(encode(a.state.LostRails()))
		a.api.want(keyTaints, pacer.Object{Body: body, Urgent: body})
	}
	if a.Sentinel != nil {
		body := string(encode(a.state.Health()))
		a.health.want("events", pacer.Object{Body: body, Urgent: body})
	}
}

// publishDrains gives the statuses of the FaredDrains to the sink.
func (a *Agent) publishDrains() {
	all := []namedStatus{}
	for _, x := range a.outcome.objects {
		all = append(all, namedStatus{x.name, x.uid, statusOf(x, a.last.Status.GetDrains())})
	}
	body := string(encode(all))
	a.api.want(keyDrains, pacer.Object{Body: body, Urgent: body})
}

// publishConditions gives the conditions to the sink, with the times at which they became true or false.
func (a *Agent) publishConditions() {
	if !a.known {
		return
	}
	var all []condition
	urgent := ""
	for _, c := range a.state.Conditions(a.UnusableBelow) {
		since := a.transitions[c.Type].Since
		if c.Status != a.transitions[c.Type].Status {
			since = time.Now().UTC().Format(time.RFC3339)
		}
		a.transitions[c.Type] = condition{c, since}
		all = append(all, a.transitions[c.Type])
		urgent += c.Status + c.Reason
	}
	a.api.want(keyConditions, pacer.Object{Body: conditionsBody(a.Node, all), Urgent: urgent})
}

// writeHealth sends the events of entities whose health has changed.
func (a *Agent) writeHealth(ctx context.Context, _, body string) error {
	var all []nodestate.Health
	if err := json.Unmarshal([]byte(body), &all); err != nil {
		return err
	}
	var events []sentinel.Event
	now := time.Now()
	for _, h := range all {
		if a.sent[h.Entity+h.Value] != h {
			events = append(events, sentinel.Event{Node: a.Node, Check: h.Check, Message: h.Message, EntityType: h.Entity, EntityValue: h.Value,
				Healthy: h.Healthy, Fatal: h.Fatal, Time: now})
		}
	}
	if len(events) == 0 {
		return nil
	}
	if err := a.Sentinel.Send(ctx, events); err != nil {
		return err
	}
	for _, h := range all {
		a.sent[h.Entity+h.Value] = h
	}
	return nil
}
