package agent

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path"
	"time"

	"github.com/fared/fared/dataplane/bpf"
	"github.com/fared/fared/dataplane/linux"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/tlsfiles"
)

// Drivers.
const (
	// Auto selects BPF if the kernel supports it, otherwise Linux.
	Auto = "auto"
	// BPF steers every flow of a slot to the slot's sub-port, and uses Linux for all other flows.
	BPF = "bpf"
	// Linux forwards with the kernel's nexthop groups.
	Linux = "linux"
	// Memory forwards nothing.
	Memory = "memory"
)

// DefaultStopTimeout is the default of Config.StopTimeout.
const DefaultStopTimeout = 2 * time.Second

// Config configures an agent. At least one of Socket, Listen and InProcess is required.
type Config struct {
	// Driver is one of the constants; "" selects Auto.
	Driver string

	// Socket is the path of a unix socket; "" disables it. SocketMode 0 selects 0660. SocketOwner is "user",
	// "user:group" or ":group"; "" selects the owner of the process.
	Socket      string
	SocketMode  os.FileMode
	SocketOwner string
	// Listen is a TCP address, host:port; "" disables it. Without TLS, only a loopback address is accepted, and clients
	// may only read. TLS must require and verify client certificates; those with one of the names of TLSClients may
	// program, the others read. A name is as in tlsfiles.CheckName: "node7.example", "*.example" or "*".
	Listen     string
	TLS        *tls.Config
	TLSClients []string
	// AllowPrefixes are the prefixes in which destinations may be programmed, AllowDevices the devices that may be
	// sub-ports: patterns of path.Match, such as "eth*". Empty lists permit all but the addresses, gateways and other
	// networks of this machine, which only an allowed prefix of the same length or a longer one permits.
	AllowPrefixes []netip.Prefix
	AllowDevices  []string
	// InProcess serves Agent.Conn, for a control plane in this process.
	InProcess bool
	// MetricsListen is the address of /metrics and /healthz, host:port; "" disables them.
	MetricsListen string

	// Linux and BPF configure the drivers. Their loggers default to Log. BPF.PinDir defaults to bpf.DefaultPinDir, with
	// a number appended in a network namespace other than the host's.
	Linux linux.Config
	BPF   bpf.Config

	// Journal is the path of the journal; "" disables it, so that a restart waits for the control plane. The file of
	// the addresses of sub-ports has this name with .addresses.
	Journal string

	// Pods is the directory of attachments (fare.v1.AttachService); "" refuses them, as Memory does.
	Pods string

	// Notify enables readiness and watchdog notifications for systemd (sd_notify).
	Notify bool
	// LogDropped returns the number of lines that Log has left out, for the metrics; nil means none.
	LogDropped func() uint64
	// Version is returned by Hello.
	Version string
	// StopTimeout is the time for calls to finish after the end of Run's context; 0 selects DefaultStopTimeout.
	StopTimeout time.Duration
	Log         *slog.Logger // nil disables logging
}

// FieldError means that a field of Config is missing, invalid or unusable.
type FieldError struct {
	Field string // name of the field, "BPF.PinDir" for a field of a field
	Err   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

func (e *FieldError) Unwrap() error { return e.Err }

// addresses returns the path of the file of addresses, "" without a journal.
func (c *Config) addresses() string {
	if c.Journal == "" {
		return ""
	}
	return c.Journal + ".addresses"
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
		return fmt.Errorf("unknown driver %q: use auto, bpf, linux or memory", c.Driver)
	}
	for _, prefix := range c.AllowPrefixes {
		if prefix != prefix.Masked() || !prefix.IsValid() {
			return &FieldError{"AllowPrefixes", fmt.Errorf("%s has bits beyond its length: use %s", prefix, prefix.Masked())}
		}
	}
	for _, pattern := range c.AllowDevices {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			return &FieldError{"AllowDevices", fmt.Errorf("%q is neither a device nor a pattern such as eth*", pattern)}
		}
	}
	for _, name := range c.TLSClients {
		if err := tlsfiles.CheckName(name); err != nil {
			return &FieldError{"TLSClients", err}
		}
	}
	if len(c.TLSClients) > 0 && c.TLS == nil {
		return &FieldError{"TLSClients", errors.New("there is no TLS in which a client could show a certificate")}
	}
	if c.TLS != nil {
		if err := grpcserve.CheckTLS(c.TLS); err != nil {
			return &FieldError{"TLS", err}
		}
	}
	return nil
}
