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
	Target  string // for grpc.NewClient
}

// Mesh is the full mesh that a connection manager sets up.
type Mesh struct {
	// Generation is the number of the mesh, not 0. Consecutive meshes need consecutive numbers: their cids then differ, so that packets of
	// one mesh do not reach connections of the other.
	Generation uint64
	Parameters *farev1.SuperpParameters // nil: those of the agents
	Nodes      []Node
	// Ordered has one element per connection of a pair of nodes: whether the connection is ordered. Empty means one unordered connection.
	Ordered []bool
}

// Plan returns the configuration of each node's agent, in the order of Nodes. It is deterministic. The cids of a node are distinct.
func (m *Mesh) Plan() ([]*farev1.ConfigureSuperpRequest, error) {
	kinds := m.Ordered
	if len(kinds) == 0 {
		kinds = []bool{false}
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
	for i := range m.Nodes {
		plan[i].Nodes = nodes
		for j := range m.Nodes {
			for k, ordered := range kinds {
				if i != j {
					plan[i].Connections = append(plan[i].Connections, &farev1.SuperpConnection{LocalAddress: nodes[i].Address,
						RemoteAddress: nodes[j].Address, LocalCid: cid(i, j, k), RemoteCid: cid(j, i, k), Ordered: ordered})
				}
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
	agents []farev1.SuperpServiceClient
}

// NewManager makes the plan and the clients of all agents, without contacting them.
func NewManager(m Mesh, options ...grpc.DialOption) (*Manager, error) {
	plan, err := m.Plan()
	if err != nil {
		return nil, err
	}
	x := &Manager{mesh: m, plan: plan}
	for _, n := range m.Nodes {
		conn, err := grpc.NewClient(n.Target, options...)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("superp: agent of %s: %w", n.Name, err), x.Close())
		}
		x.conns = append(x.conns, conn)
		x.agents = append(x.agents, farev1.NewSuperpServiceClient(conn))
	}
	return x, nil
}

// Up configures every agent, then starts every agent. If one refuses, Up ends this generation, hard, at all agents that it can reach before
// ctx ends.
func (m *Manager) Up(ctx context.Context) error {
	err := m.all(func(i int) error {
		_, err := m.agents[i].ConfigureSuperp(ctx, m.plan[i])
		return err
	})
	if err == nil {
		err = m.all(func(i int) error {
			_, err := m.agents[i].StartSuperp(ctx, &farev1.StartSuperpRequest{Generation: m.mesh.Generation})
			return err
		})
	}
	if err != nil {
		return errors.Join(err, m.Down(ctx, true))
	}
	return nil
}

// Down ends the mesh. A soft shutdown waits until all outstanding operations have finished, or ctx ends.
func (m *Manager) Down(ctx context.Context, hard bool) error {
	return m.all(func(i int) error {
		_, err := m.agents[i].ShutdownSuperp(ctx, &farev1.ShutdownSuperpRequest{Generation: m.mesh.Generation, Hard: hard})
		return err
	})
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
	for i := range m.agents {
		wait.Go(func() {
			if err := ask(i); err != nil {
				errs[i] = fmt.Errorf("superp: agent of %s: %w", m.mesh.Nodes[i].Name, err)
			}
		})
	}
	wait.Wait()
	return errors.Join(errs...)
}
