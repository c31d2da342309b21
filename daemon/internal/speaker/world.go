package speaker

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
)

// world holds every running BgpServer of this process.
//
// StartBgp writes two package variables of GoBGP, table.SelectionOptions and
// table.UseMultiplePaths, without a lock. Their readers are every server's own
// goroutine, whenever it handles a message or a call, and ListPath, which the
// speaker does not call, in the goroutine of its caller. So a server is started
// while all other servers wait at their gates. All servers always write the same
// value; only the access must be ordered.
var world struct {
	mu      sync.Mutex // held while a server starts
	running []*bgpServer
}

// gate implements GoBGP's timing hook. The server goroutine calls the hook
// after each operation, and pause can block it there.
type gate struct{ closed atomic.Pointer[halt] }

type halt struct{ arrived, open chan struct{} }

// Observe implements server.FSMTimingHook. Only the server's goroutine calls it.
func (g *gate) Observe(server.FSMOperation, time.Duration, time.Duration) {
	if h := g.closed.Load(); h != nil {
		close(h.arrived)
		<-h.open
	}
}

// pause returns when the server's goroutine waits at its gate; resume releases
// it. If the goroutine does not arrive within the server's patience, pause
// marks the server as failed and returns: a hung goroutine reads nothing
// either.
func (s *bgpServer) pause() (resume func()) {
	h := &halt{arrived: make(chan struct{}), open: make(chan struct{})}
	s.gate.closed.Store(h)
	var nudge sync.WaitGroup
	nudge.Go(func() {
		// Any call makes the goroutine pass the gate if it is waiting for work.
		// The answer is irrelevant.
		_, _ = s.bgp.GetBgp(context.Background(), &api.GetBgpRequest{})
	})
	_, came := patiently(s.patience, h.arrived)
	if !came {
		s.fail(fmt.Errorf("gobgp did not answer a call within %v", s.patience))
	}
	return func() {
		s.gate.closed.Store(nil)
		close(h.open)
		if came {
			nudge.Wait()
		}
	}
}

// exclusively runs start while all running servers of the process are paused,
// then adds servers to the running ones.
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

// leave removes a stopped server from the world.
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
