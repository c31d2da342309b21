package superp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Node is a node of a mesh, with the address of its agent.
type Node struct {
	Name    string
	Address netip.Addr
	// Agent is the client of the agent; nil means that NewManager makes one for Target. A node without both is
	// configured by other means, to its part of Manager.Plan.
	Agent  farev1.SuperpServiceClient
	Target string // for grpc.NewClient
}

// Mesh is the full mesh that a connection manager sets up.
type Mesh struct {
	// Generation is the number of the mesh, not 0. Consecutive meshes need consecutive numbers: their cids then differ,
	// so that packets of one mesh do not reach connections of the other.
	Generation uint64
	Parameters *farev1.SuperpParameters // nil: those of the agents
	Nodes      []Node
	// Ordered has one element per connection of a pair of nodes: whether the connection is ordered. Empty means one
	// unordered connection.
	Ordered []bool
	// Classes has the traffic class of each of these connections. Empty means those of the agents, and so does 0.
	Classes []uint8
	// Key returns the key for the Sends to the next end of a connection; nil means 0 for all.
	Key func() uint32
}

// Plan returns the configuration of each node's agent, in the order of Nodes. It is deterministic, except for the keys.
// The cids of a node are distinct.
func (m *Mesh) Plan() ([]*farev1.ConfigureSuperpRequest, error) {
	kinds := m.Ordered
	if len(kinds) == 0 {
		kinds = []bool{false}
	}
	if len(m.Classes) > 0 && len(m.Classes) != len(kinds) {
		return nil, fmt.Errorf("superp: %d traffic classes for %d connections a pair", len(m.Classes), len(kinds))
	}
	each := len(kinds) * (len(m.Nodes) - 1)
	if m.Generation == 0 {
		return nil, errors.New("superp: generation is 0")
	}
	if len(m.Nodes) < 2 || each > 0xffff {
		return nil, fmt.Errorf("superp: a mesh of %d nodes with %d connections a pair", len(m.Nodes), len(kinds))
	}
	plan := make([]*farev1.ConfigureSuperpRequest, len(m.Nodes))
	names, addresses := map[string]bool{}, map[netip.Addr]bool{}
	var nodes []*farev1.SuperpNode
	for i, n := range m.Nodes {
		if n.Name == "" || !n.Address.IsValid() || names[n.Name] || addresses[n.Address.Unmap()] {
			return nil, fmt.Errorf("superp: node %d (%q, %v): set a unique name and a unique address", i, n.Name, n.Address)
		}
		names[n.Name], addresses[n.Address.Unmap()] = true, true
		nodes = append(nodes, &farev1.SuperpNode{Name: n.Name, Address: n.Address.Unmap().String()})
		plan[i] = &farev1.ConfigureSuperpRequest{Generation: m.Generation, Parameters: m.Parameters}
	}
	// The k-th connection of a generation has the k-th cid after those of the previous generation, mod 65535.
	first := m.Generation % 0xffff * uint64(each) % 0xffff
	cid := func(of, peer, kind int) uint32 {
		if peer > of {
			peer--
		}
		return uint32(1 + (first+uint64(peer*len(kinds)+kind))%0xffff)
	}
	if m.Key == nil {
		m.Key = func() uint32 { return 0 }
	}
	keys := make([]uint32, len(m.Nodes)*each) // of the Sends to each end, by node and cid without the generation's offset
	for i := range keys {
		keys[i] = m.Key()
	}
	key := func(of, peer, kind int) uint32 {
		if peer > of {
			peer--
		}
		return keys[of*each+peer*len(kinds)+kind]
	}
	for i := range m.Nodes {
		plan[i].Nodes = nodes
		for j := range m.Nodes {
			for k, ordered := range kinds {
				if i == j {
					continue
				}
				c := &farev1.SuperpConnection{LocalAddress: nodes[i].Address, RemoteAddress: nodes[j].Address, LocalCid: cid(i, j, k), RemoteCid: cid(j, i, k),
					Ordered: ordered, LocalKey: key(i, j, k), RemoteKey: key(j, i, k)}
				if len(m.Classes) > 0 {
					c.TrafficClass = uint32(m.Classes[k])
				}
				plan[i].Connections = append(plan[i].Connections, c)
			}
		}
	}
	return plan, nil
}

// Manager is a connection manager: it sets up a mesh through the agents, and takes it down.
type Manager struct {
	mesh   Mesh
	plan   []*farev1.ConfigureSuperpRequest
	conns  []*grpc.ClientConn
	agents []farev1.SuperpServiceClient // nil for a node without an agent
}

// NewManager makes the plan and the clients of agents, without contacting them.
func NewManager(m Mesh, options ...grpc.DialOption) (*Manager, error) {
	plan, err := m.Plan()
	if err != nil {
		return nil, err
	}
	x := &Manager{mesh: m, plan: plan}
	for _, n := range m.Nodes {
		if n.Agent != nil || n.Target == "" {
			x.agents = append(x.agents, n.Agent)
			continue
		}
		conn, err := grpc.NewClient(n.Target, options...)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("superp: agent of %s: %w", n.Name, err), x.Close())
		}
		x.conns = append(x.conns, conn)
		x.agents = append(x.agents, farev1.NewSuperpServiceClient(conn))
	}
	return x, nil
}

// Plan returns the configuration of each node, in the order of Mesh.Nodes.
func (m *Manager) Plan() []*farev1.ConfigureSuperpRequest { return m.plan }

// Up configures every agent, then starts every agent. If one refuses, Up ends the generation, hard, at the agents that
// have accepted its configuration and that it can reach before ctx ends. An agent that refuses may have a configuration
// of the same number from another manager, which stays.
func (m *Manager) Up(ctx context.Context) error {
	accepted := make([]bool, len(m.agents))
	err := m.all(func(i int) error {
		_, err := m.agents[i].ConfigureSuperp(ctx, m.plan[i])
		accepted[i] = err == nil
		return err
	})
	if err == nil {
		err = m.all(func(i int) error {
			_, err := m.agents[i].StartSuperp(ctx, &farev1.StartSuperpRequest{Generation: m.mesh.Generation})
			return err
		})
	}
	if err == nil {
		return nil
	}
	return errors.Join(err, m.all(func(i int) error {
		if !accepted[i] {
			return nil
		}
		return m.down(ctx, i, true)
	}))
}

// Down ends the mesh. A soft shutdown waits until all outstanding operations have finished, or ctx ends.
func (m *Manager) Down(ctx context.Context, hard bool) error {
	return m.all(func(i int) error { return m.down(ctx, i, hard) })
}

func (m *Manager) down(ctx context.Context, i int, hard bool) error {
	_, err := m.agents[i].ShutdownSuperp(ctx, &farev1.ShutdownSuperpRequest{Generation: m.mesh.Generation, Hard: hard})
	return err
}

// Close closes the clients. The connections of the mesh stay.
func (m *Manager) Close() error {
	var errs []error
	for _, c := range m.conns {
		errs = append(errs, c.Close())
	}
	m.conns = nil
	return errors.Join(errs...)
}

// all calls every agent concurrently. Its error names the agents that fail.
func (m *Manager) all(ask func(i int) error) error {
	errs := make([]error, len(m.agents))
	var wait sync.WaitGroup
	for i, agent := range m.agents {
		if agent == nil {
			continue
		}
		wait.Go(func() {
			if err := ask(i); err != nil {
				errs[i] = fmt.Errorf("superp: agent of %s: %w", m.mesh.Nodes[i].Name, err)
			}
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}
