package agent

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/fared/fared/dataplane/bpf"
	"github.com/fared/fared/dataplane/linux"
)

// Drivers.
const (
	// Auto is BPF where the kernel can do it, else Linux.
	Auto = "auto"
	// BPF steers every flow of a slot where the slot wants it, and falls back on what Linux does for all others.
	BPF = "bpf"
	// Linux forwards by the kernel's nexthop groups.
	Linux = "linux"
	// Memory forwards nothing.
	Memory = "memory"
)

// DefaultStopTimeout is how long calls may go on after the end was asked for.
const DefaultStopTimeout = 2 * time.Second

// Config describes an agent. At least one of Socket and Listen is needed.
type Config struct {
	// Driver is one of the constants; "" is Auto.
	Driver string

	// Socket is the path of a unix socket; "": none. SocketMode 0 is 0660. SocketOwner is "user", "user:group" or ":group";
	// "": the process's own.
	Socket      string
	SocketMode  os.FileMode
	SocketOwner string
	// Listen is a TCP address, host:port; "": none. Without TLS only a loopback is accepted. TLS must demand and verify
	// client certificates.
	Listen string
	TLS    *tls.Config
	// MetricsListen is where /metrics and /healthz are served, host:port; "": nowhere.
	MetricsListen string

	// Linux and BPF say what the drivers may call their own, and how they work. Their loggers are Log when not set, and
	// BPF.PinDir is bpf.DefaultPinDir, with a number at its end in another network namespace than the host's.
	Linux linux.Config
	BPF   bpf.Config

	// Journal is the journal's path; "": none is kept, and a restart waits for its control plane.
	Journal string

	// Notify tells systemd (sd_notify) of readiness and the watchdog.
	Notify bool
	// Version is what Hello answers.
	Version string
	// StopTimeout is how long calls may go on after Run's context ended; 0: DefaultStopTimeout.
	StopTimeout time.Duration
	Log         *slog.Logger // nil: nothing is logged
}

func (c *Config) complete() error {
	if c.Driver == "" {
		c.Driver = Auto
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = DefaultStopTimeout
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Linux.Logger == nil {
		c.Linux.Logger = c.Log
	}
	if c.BPF.Log == nil {
		c.BPF.Log = c.Log
	}
	if c.BPF.PinDir == "" && c.Driver != Memory {
		var err error
		if c.BPF.PinDir, err = defaultPins(); err != nil {
			return err
		}
	}
	switch c.Driver {
	case Auto, BPF, Linux, Memory:
	default:
		return fmt.Errorf("driver %q is not known: use auto, bpf, linux or memory", c.Driver)
	}
	if c.TLS != nil && (c.TLS.ClientAuth != tls.RequireAndVerifyClientCert || c.TLS.ClientCAs == nil || c.TLS.MinVersion < tls.VersionTLS13) {
		return errors.New("TLS: clients would not need a certificate, or could use less than TLS 1.3: give --tls-client-ca")
	}
	return nil
}
