package nri

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/nri/pkg/api"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/pods"
)

const (
	firstPause = 200 * time.Millisecond
	mostPause  = 5 * time.Second
)

// pod is a pod with a separate network namespace. Its goroutine attaches it.
type pod struct {
	sandbox *api.PodSandbox
	log     *slog.Logger
	// until is the end of the time for which containers may be held.
	until time.Time
	// stop ends the goroutine, which closes ended.
	stop  context.CancelFunc
	ended chan struct{}
	// answered is closed when the agent has answered, or when waiting for it is of no use; effective when weights are
	// in effect, or are not to be waited for.
	answered, effective gate

	mu        sync.Mutex
	asked     bool   // the agent may have an attachment
	directory string // Attachment.slots_directory, "" without an attachment
}

// gate is a channel that is closed once.
type gate struct {
	once sync.Once
	open chan struct{}
}

func newGate() gate { return gate{open: make(chan struct{})} }

func (g *gate) pass() { g.once.Do(func() { close(g.open) }) }

// slots returns the directory of the pod's slot table, "" without an attachment.
func (p *pod) slots() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.directory
}

func (p *pod) note(directory string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = true
	if directory != "" {
		p.directory = directory
	}
}

func (p *pod) wasAsked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// attach attaches the pod, if it is to be attached, and tries again while the agent is absent.
func (p *pod) attach(ctx context.Context, agent *pods.Agent, choose func(*api.PodSandbox) (*farev1.AttachRequest, bool, error)) {
	defer close(p.ended)
	defer p.answered.pass()
	defer p.effective.pass()
	req, wanted, err := choose(p.sandbox)
	if err != nil {
		p.log.Warn("the pod starts without its planes", "error", err)
	}
	if req == nil {
		return
	}
	pause, absent := firstPause, false
	for wait := time.Duration(0); ; {
		p.note("")
		begin := time.Now()
		a, err := agent.Attach(ctx, req, wait)
		switch {
		case err == nil:
			p.note(a.GetSlotsDirectory())
			p.answered.pass()
			if a.GetInEffect() || a.GetError() != "" {
				p.report(a)
				return
			}
			if wait > 0 && time.Since(begin) < wait && !waits.For(ctx, pause) {
				return
			}
			wait = mostPause
			continue
		case ctx.Err() != nil:
			return
		case !pods.Absent(err):
			p.refused(wanted, err)
			return
		case !absent:
			absent = true
			p.log.Warn("the agent does not answer: the pod starts without its planes, and is attached when 'fared dataplane' runs", "error", pods.Reason(err))
		}
		p.answered.pass() // nothing is held while fared is down
		p.effective.pass()
		if !waits.For(ctx, pause) {
			return
		}
		pause = min(2*pause, mostPause)
	}
}

func (p *pod) report(a *farev1.Attachment) {
	if a.Error != "" {
		p.log.Warn("the pod does not follow the weights", "error", a.Error)
		return
	}
	p.log.Info("the pod follows the weights", "devices", len(a.Devices), "destinations", a.Destinations, "slots", a.SlotsDirectory)
}

// refused reports a refusal. Without the annotation it means that the devices are not those of sub-ports.
func (p *pod) refused(wanted bool, err error) {
	level := slog.LevelDebug
	if wanted {
		level = slog.LevelWarn
	}
	p.log.Log(context.Background(), level, "the pod is not attached", "error", pods.Reason(err))
}

// detach ends the goroutine and then the attachment.
func (p *pod) detach(ctx context.Context, agent *pods.Agent, id string) {
	p.stop()
	<-p.ended
	for pause := firstPause; p.wasAsked(); pause = min(2*pause, mostPause) {
		if err := agent.Detach(ctx, id); err == nil || !pods.Absent(err) || !waits.For(ctx, pause) {
			return
		}
	}
}
