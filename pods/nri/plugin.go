// Package nri is the plugin `fared nri` of container runtimes: it attaches pods to the agent after other plugins have
// put devices into them, holds their first containers until weights are in effect, and mounts their slot tables.
//
// A runtime calls its plugins one after another, for all pods: only held containers delay an answer.
package nri

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"

	"github.com/fared/fared/pods"
)

// slotsTarget is the directory in a container at which programs look for the slot table.
const slotsTarget = "/run/fared"

// plugin has the pods of a runtime.
type plugin struct {
	agent  *pods.Agent
	log    *slog.Logger
	wait   time.Duration
	choose chooser

	ctx  context.Context // ends the goroutines of pods
	work sync.WaitGroup

	mu   sync.Mutex
	pods map[string]*pod // by the ids of sandboxes
	// patience returns the time that the runtime waits for an answer.
	patience func() time.Duration
}

// Synchronize attaches the pods that started without the plugin, and forgets those that have ended.
func (p *plugin) Synchronize(_ context.Context, all []*api.PodSandbox, _ []*api.Container) ([]*api.ContainerUpdate, error) {
	present := make(map[string]bool, len(all))
	for _, sandbox := range all {
		present[sandbox.GetId()] = true
		p.start(sandbox, 0)
	}
	p.mu.Lock()
	var gone []*api.PodSandbox
	for id, pod := range p.pods {
		if !present[id] {
			gone = append(gone, pod.sandbox)
		}
	}
	p.mu.Unlock()
	for _, sandbox := range gone {
		p.end(sandbox)
	}
	p.log.Info("synchronized with the runtime", "pods", len(all))
	return nil, nil
}

// RunPodSandbox begins to attach a pod.
func (p *plugin) RunPodSandbox(_ context.Context, sandbox *api.PodSandbox) error {
	p.start(sandbox, p.wait)
	return nil
}

// StopPodSandbox begins to detach a pod.
func (p *plugin) StopPodSandbox(_ context.Context, sandbox *api.PodSandbox) error {
	p.end(sandbox)
	return nil
}

// RemovePodSandbox is StopPodSandbox for a pod that was not stopped.
func (p *plugin) RemovePodSandbox(_ context.Context, sandbox *api.PodSandbox) error {
	p.end(sandbox)
	return nil
}

// CreateContainer mounts the pod's slot table. It waits for the agent's answer, which names the directory.
func (p *plugin) CreateContainer(ctx context.Context, sandbox *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	pod := p.pod(sandbox)
	if pod == nil {
		return nil, nil, nil
	}
	p.hold(ctx, pod, &pod.answered)
	directory := pod.slots()
	if directory == "" || mounted(c) {
		return nil, nil, nil
	}
	if _, err := os.Stat(directory); err != nil {
		pod.log.Warn("the container has no slot table", "container", c.GetName(), "error", err)
		return nil, nil, nil
	}
	adjust := &api.ContainerAdjustment{}
	adjust.AddMount(&api.Mount{Destination: slotsTarget, Source: directory, Type: "bind", Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"}})
	return adjust, nil, nil
}

// mounted reports whether the pod's author has mounted something where the slot table belongs.
func mounted(c *api.Container) bool {
	for _, m := range c.GetMounts() {
		if d := m.GetDestination(); d == slotsTarget || strings.HasPrefix(d, slotsTarget+"/") {
			return true
		}
	}
	return false
}

// StartContainer waits until weights are in effect in the pod.
func (p *plugin) StartContainer(ctx context.Context, sandbox *api.PodSandbox, _ *api.Container) error {
	if pod := p.pod(sandbox); pod != nil {
		p.hold(ctx, pod, &pod.effective)
	}
	return nil
}

// hold waits for a gate until the pod's time is over. The runtime disconnects a plugin that needs longer than its
// patience.
func (p *plugin) hold(ctx context.Context, pod *pod, g *gate) {
	p.mu.Lock()
	patience := p.patience
	p.mu.Unlock()
	end := time.NewTimer(min(time.Until(pod.until), patience()*3/4))
	defer end.Stop()
	select {
	case <-g.open:
	case <-end.C:
	case <-ctx.Done():
	}
}

func (p *plugin) pod(sandbox *api.PodSandbox) *pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pods[sandbox.GetId()]
}

// start begins to attach a pod whose containers may be held for a time.
func (p *plugin) start(sandbox *api.PodSandbox, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods[sandbox.GetId()] != nil || namespace(sandbox) == "" {
		return
	}
	ctx, stop := context.WithCancel(p.ctx)
	pod := &pod{
		sandbox: sandbox, log: p.log.With("pod", sandbox.GetNamespace()+"/"+sandbox.GetName(), "id", attachmentID(sandbox)),
		until: time.Now().Add(wait), stop: stop, ended: make(chan struct{}), answered: newGate(), effective: newGate(),
	}
	p.pods[sandbox.GetId()] = pod
	p.work.Go(func() { pod.attach(ctx, p.agent, p.choose.choose) })
}

// end begins to detach a pod.
func (p *plugin) end(sandbox *api.PodSandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[sandbox.GetId()]
	if pod == nil {
		return
	}
	delete(p.pods, sandbox.GetId())
	id := attachmentID(sandbox)
	shared := false
	for _, other := range p.pods {
		shared = shared || attachmentID(other.sandbox) == id
	}
	p.work.Go(func() {
		if shared { // the pod has a new sandbox
			pod.stop()
			return
		}
		pod.detach(p.ctx, p.agent, id)
	})
}
