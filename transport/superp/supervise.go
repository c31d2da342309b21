package superp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// ErrSystem is the error of Supervise if an agent is lost: a system error, after which all that use the mesh have to be
// restarted.
var ErrSystem = errors.New("an agent is lost, so the mesh has ended")

// ErrEnded is the error of Supervise if the mesh has ended at an agent by another hand.
var ErrEnded = errors.New("the mesh has ended")

// Supervision is the configuration of Manager.Supervise. Its functions are called one at a time; nil means no call.
type Supervision struct {
	// Lost is the time after which an agent that does not answer is a system error; 0 means 30 s.
	Lost time.Duration
	// ProtocolError is called for each protocol error that a node's agent reports. missed is the number of errors
	// before it that were not reported.
	ProtocolError func(node string, e *farev1.SuperpProtocolError, missed uint64)
	// Failed is called when a connection has failed. A connection to a node without an agent is not restarted.
	Failed func(node string, c *farev1.SuperpConnectionStatus)
	// Restarted is called after the restart of a connection, or after an attempt that has failed, and will be repeated.
	Restarted func(node, peer string, c *farev1.SuperpConnection, err error)
}

// link is a connection with its two ends.
type link struct {
	nodes [2]int
	ends  [2]*farev1.SuperpConnection
	// The main loop's state.
	restarting bool
	broken     bool // the latest attempt has failed
	attempts   int
	restarted  time.Time
	// restarts has the number of restarts of each end; a status with a lower one is outdated. An attempt writes it.
	restarts [2]uint32
}

// Restarts of a connection wait from the second attempt on, and twice as long each time. A connection that has worked
// for calm begins anew.
const (
	firstWait = time.Second
	maxWait   = time.Minute
	calm      = 5 * time.Minute
	// attempt is the least time for a restart, of which an agent waits two seconds.
	attempt = 10 * time.Second
	// watchAgain is the pause before an agent that does not answer is asked again.
	watchAgain = 500 * time.Millisecond
)

// links returns all connections of the mesh.
func (m *Manager) links() (all []*link) {
	index := map[string]int{}
	for i := range m.plan {
		index[m.plan[i].Nodes[i].Address] = i
	}
	for i := range m.plan {
		for _, c := range m.plan[i].Connections {
			j := index[c.RemoteAddress]
			if j < i {
				continue
			}
			for _, d := range m.plan[j].Connections {
				if d.RemoteAddress == c.LocalAddress && d.LocalCid == c.RemoteCid {
					all = append(all, &link{nodes: [2]int{i, j}, ends: [2]*farev1.SuperpConnection{c, d}})
				}
			}
		}
	}
	return all
}

// observation is a status of a node's agent, or the error of asking for it.
type observation struct {
	node   int
	status *farev1.SuperpStatus
	err    error
}

// supervisor is the state of Manager.Supervise, which its goroutine owns.
type supervisor struct {
	*Manager
	o      Supervision
	links  []*link
	latest []*farev1.SuperpStatus
	number []uint64          // latest protocol error of each node
	lost   []time.Time       // since when the agent does not answer; zero: it does
	failed map[string]string // by node and cid: the number of restarts, and the reason that was reported
	done   chan restarted
	wait   sync.WaitGroup
}

type restarted struct {
	link *link
	err  error
}

// Supervise follows the agents of a mesh after Up, until ctx ends. It reports their protocol errors. When a connection
// fails, it ends the connection at the other end, too (hard), and restarts it at both ends; its pending operations have
// failed and are not repeated. When an agent does not answer for o.Lost, it ends the mesh (hard) at all others and
// returns ErrSystem. Connections that were shut down in order stay so.
func (m *Manager) Supervise(ctx context.Context, o Supervision) error {
	if o.Lost == 0 {
		o.Lost = 30 * time.Second
	}
	if o.ProtocolError == nil {
		o.ProtocolError = func(string, *farev1.SuperpProtocolError, uint64) {}
	}
	if o.Failed == nil {
		o.Failed = func(string, *farev1.SuperpConnectionStatus) {}
	}
	if o.Restarted == nil {
		o.Restarted = func(string, string, *farev1.SuperpConnection, error) {}
	}
	ctx, cancel := context.WithCancel(ctx)
	n := len(m.agents)
	s := &supervisor{Manager: m, o: o, links: m.links(), latest: make([]*farev1.SuperpStatus, n), number: make([]uint64, n), lost: make([]time.Time, n),
		failed: map[string]string{}, done: make(chan restarted)}
	seen := make(chan observation)
	defer s.wait.Wait()
	defer cancel()
	for i, agent := range m.agents {
		if agent != nil {
			s.wait.Go(func() { watch(ctx, i, agent, seen) })
		}
	}
	tick := time.NewTicker(min(time.Second, o.Lost/4))
	defer tick.Stop()
	for {
		select {
		case x := <-seen:
			if err := s.observe(ctx, x); err != nil {
				return err
			}
		case x := <-s.done:
			s.finished(x)
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		for i, since := range s.lost {
			if !since.IsZero() && time.Since(since) > o.Lost {
				return s.systemError(i)
			}
		}
		s.repair(ctx)
	}
}

// watch sends the statuses of an agent to seen until ctx ends.
func watch(ctx context.Context, i int, agent farev1.SuperpServiceClient, seen chan<- observation) {
	send := func(x observation) bool {
		select {
		case seen <- x:
			return true
		case <-ctx.Done():
			return false
		}
	}
	for ctx.Err() == nil {
		stream, err := agent.WatchSuperpStatus(ctx, &farev1.WatchSuperpStatusRequest{})
		for err == nil {
			var r *farev1.WatchSuperpStatusResponse
			if r, err = stream.Recv(); err == nil && !send(observation{node: i, status: r.Status}) {
				return
			}
		}
		if !send(observation{node: i, err: err}) {
			return
		}
		select {
		case <-time.After(watchAgain):
		case <-ctx.Done():
		}
	}
}

// observe takes a status of an agent.
func (s *supervisor) observe(ctx context.Context, x observation) error {
	name := s.mesh.Nodes[x.node].Name
	switch {
	case x.err != nil:
		if s.lost[x.node].IsZero() && ctx.Err() == nil {
			s.lost[x.node] = time.Now()
		}
		return nil
	case x.status.GetGeneration() != s.mesh.Generation:
		return fmt.Errorf("superp: agent of %s: %w: it has generation %d", name, ErrEnded, x.status.GetGeneration())
	}
	s.lost[x.node], s.latest[x.node] = time.Time{}, x.status
	for _, e := range x.status.ProtocolErrors {
		if e.Number > s.number[x.node] {
			s.o.ProtocolError(name, e, e.Number-s.number[x.node]-1)
			s.number[x.node] = e.Number
		}
	}
	for _, c := range x.status.Connections {
		at := fmt.Sprint(x.node, "/", c.GetConnection().GetLocalCid())
		if reason := fmt.Sprint(c.Restarts, c.Error); c.Error != "" && s.failed[at] != reason {
			s.failed[at] = reason
			s.o.Failed(name, c)
		}
	}
	return nil
}

// hasFailed reports whether an end of a connection has failed.
func (s *supervisor) hasFailed(l *link) bool {
	for k, node := range l.nodes {
		for _, c := range s.latest[node].GetConnections() {
			ended := c.State == farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_ENDED && c.Error != ""
			if ended && c.GetConnection().GetLocalCid() == l.ends[k].LocalCid && c.Restarts >= l.restarts[k] {
				return true
			}
		}
	}
	return false
}

// repair begins the restart of failed connections.
func (s *supervisor) repair(ctx context.Context) {
	for _, l := range s.links {
		if l.restarting || s.agents[l.nodes[0]] == nil || s.agents[l.nodes[1]] == nil || !l.broken && !s.hasFailed(l) {
			continue
		}
		if time.Since(l.restarted) > calm {
			l.attempts = 0
		}
		wait := time.Duration(0)
		if l.attempts > 0 {
			wait = min(firstWait<<min(l.attempts-1, 10), maxWait)
		}
		l.attempts++
		l.restarting = true
		s.wait.Go(func() {
			err := s.restart(ctx, l, wait)
			select {
			case s.done <- restarted{l, err}:
			case <-ctx.Done():
			}
		})
	}
}

// finished takes the result of a restart.
func (s *supervisor) finished(x restarted) {
	l := x.link
	l.restarting, l.broken, l.restarted = false, x.err != nil, time.Now()
	s.o.Restarted(s.mesh.Nodes[l.nodes[0]].Name, s.mesh.Nodes[l.nodes[1]].Name, l.ends[0], x.err)
}

// restart ends a connection at both ends, and restarts it.
func (s *supervisor) restart(ctx context.Context, l *link, wait time.Duration) error {
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		return ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, max(s.o.Lost, attempt))
	defer cancel()
	generation := s.mesh.Generation
	for _, step := range []func(k int, agent farev1.SuperpServiceClient, cid uint32) error{
		func(_ int, agent farev1.SuperpServiceClient, cid uint32) error {
			_, err := agent.ShutdownSuperpConnection(ctx, &farev1.ShutdownSuperpConnectionRequest{Generation: generation, LocalCid: cid, Hard: true})
			return err
		},
		func(k int, agent farev1.SuperpServiceClient, cid uint32) error {
			r, err := agent.RestartSuperpConnection(ctx, &farev1.RestartSuperpConnectionRequest{Generation: generation, LocalCid: cid})
			if err == nil {
				l.restarts[k] = r.Restarts
			}
			return err
		},
		func(_ int, agent farev1.SuperpServiceClient, _ uint32) error {
			_, err := agent.StartSuperp(ctx, &farev1.StartSuperpRequest{Generation: generation})
			return err
		},
	} {
		errs := make([]error, 2)
		var both sync.WaitGroup
		for k, node := range l.nodes {
			both.Go(func() {
				if err := step(k, s.agents[node], l.ends[k].LocalCid); err != nil {
					errs[k] = fmt.Errorf("superp: agent of %s: %w", s.mesh.Nodes[node].Name, err)
				}
			})
		}
		both.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return nil
}

// systemError ends the mesh at all agents that answer.
func (s *supervisor) systemError(lost int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err := s.all(func(i int) error {
		if err := s.down(ctx, i, true); i != lost && status.Code(err) != codes.OK {
			return err
		}
		return nil
	})
	return errors.Join(fmt.Errorf("superp: agent of %s: %w", s.mesh.Nodes[lost].Name, ErrSystem), err)
}
