package speaker

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
)

// world is every BgpServer of this process that has been started.
//
// StartBgp writes two package variables of GoBGP, table.SelectionOptions and
// table.UseMultiplePaths, without a lock. They are read by every server's own
// goroutine whenever it handles a message or a call, and by ListPath in the
// goroutine of its caller; by nothing else. So a server is started while all
// others stand still at their gate, and readers of the caller's side hold mu.
// All servers always write the same value; it is only the access that must be
// ordered.
var world struct {
	mu      sync.RWMutex // held while a server starts; read-held by ListPath
	running []*bgpServer
}

// gate is GoBGP's timing hook: its server goroutine passes it after everything
// it does, and can be made to wait there.
type gate struct{ closed atomic.Pointer[halt] }

type halt struct{ arrived, open chan struct{} }

// Observe implements server.FSMTimingHook. Only the server's goroutine calls it.
func (g *gate) Observe(server.FSMOperation, time.Duration, time.Duration) {
	if h := g.closed.Load(); h != nil {
		close(h.arrived)
		<-h.open
	}
}

// pause returns when the server's goroutine stands at its gate; the function
// it returns lets it go on.
func (s *bgpServer) pause() (resume func()) {
	h := &halt{arrived: make(chan struct{}), open: make(chan struct{})}
	s.gate.closed.Store(h)
	var nudge sync.WaitGroup
	nudge.Go(func() {
		// Any call makes the goroutine pass the gate, should it be waiting
		// for work. The answer is of no interest.
		_, _ = s.bgp.GetBgp(context.Background(), &api.GetBgpRequest{})
	})
	<-h.arrived
	return func() {
		s.gate.closed.Store(nil)
		close(h.open)
		nudge.Wait()
	}
}

// exclusively runs start while no server of the process does anything, then
// adds the servers to those that run.
func exclusively(servers []*bgpServer, start func() error) error {
	world.mu.Lock()
	defer world.mu.Unlock()
	resumes := make([]func(), len(world.running))
	for i, s := range world.running {
		resumes[i] = s.pause()
	}
	err := start()
	for _, resume := range resumes {
		resume()
	}
	if err == nil {
		world.running = append(world.running, servers...)
	}
	return err
}

// leave takes a stopped server out of the world.
func (s *bgpServer) leave() {
	world.mu.Lock()
	defer world.mu.Unlock()
	for i, r := range world.running {
		if r == s {
			world.running = append(world.running[:i], world.running[i+1:]...)
			return
		}
	}
}
