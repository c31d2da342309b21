package agent

import (
	"errors"
	"log/slog"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/dataplane/internal/pods"
)

// openPods continues the attachments of an earlier run.
func (a *Agent) openPods() (*pods.Manager, error) {
	c := pods.Config{
		Directory: a.c.Pods, Linux: linuxSettings(&a.c), Settled: a.settled.Load, Version: a.c.Version, Log: a.log,
		Enter: func(log *slog.Logger) (pods.Guest, error) { return newGuest(&a.c, log) },
	}
	switch {
	case a.driver.name == Memory:
		c.Refusal = status.Error(codes.Unimplemented, "driver memory forwards no packets: start the agent with --driver bpf or linux")
	case a.c.Pods == "":
		c.Refusal = status.Error(codes.Unimplemented, "the agent has no directory for attachments: start it with --pods")
	}
	return pods.New(c, a.server)
}

// guest is the policy for a namespace, with the claim that excludes another agent there.
type guest struct {
	*policy
	claim *claim
	log   *slog.Logger
}

// newGuest returns the guest of the calling thread's namespace. Sub-ports are those of the host, which its policy has
// judged by their names there.
func newGuest(c *Config, log *slog.Logger) (*guest, error) {
	claim, err := takeClaim(c.Socket)
	if err != nil {
		return nil, err
	}
	p, err := newPolicy(&Config{Driver: Linux, AllowPrefixes: c.AllowPrefixes})
	if err != nil {
		return nil, errors.Join(err, claim.release())
	}
	return &guest{p, claim, log}, nil
}

// Refresh implements pods.Guest.
func (g *guest) Refresh() {
	if err := g.policy.refresh(policyInterval); err != nil {
		g.log.Warn("the policy follows an earlier state of the namespace", "error", err)
	}
}

// Close implements pods.Guest.
func (g *guest) Close() error { return errors.Join(g.policy.close(), g.claim.release()) }
