package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/traffic"
)

func trafficCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "traffic", Short: "Send verified traffic between loopbacks over the slots of fared",
		Long: `Generates traffic between loopbacks over software transports whose queue pairs take planes,
source ports and shares from fared, follows every change of weights, and verifies every byte.

  fared traffic local   nodes inside this process: no root, no daemon
  fared traffic node    on each server: sends and receives
  fared traffic run     anywhere: starts the nodes together and prints the report

Transports: ` + strings.Join(traffic.Transports(), ", ") + `. Patterns: ` + strings.Join(traffic.Patterns(), ", ") + `.`,
		Example: "  fared traffic local --pattern ring --size 64M\n  fared traffic node --listen 192.0.2.1:4795\n  fared traffic run --node a=192.0.2.1:4795 --node b=192.0.2.2:4795 --duration 10s",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return cli.Usage(fmt.Errorf("unknown command %q of %s", args[0], c.CommandPath()), "use local, node or run")
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(trafficLocalCommand(e), trafficNodeCommand(e), trafficRunCommand(e))
	return c
}

// transportFlags select the transports of the traffic.
type transportFlags struct {
	transport string
	planes    []string
	mtu       int
}

func (t *transportFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&t.transport, "transport", "roce", "transport of every plane that --plane does not name: "+strings.Join(traffic.Transports(), ", "))
	f.StringArrayVar(&t.planes, "plane", nil, "PLANE=TRANSPORT: transport of this plane; repeatable")
	f.IntVar(&t.mtu, "mtu", 0, "payload bytes of a packet: roce 256, 512, 1024, 2048 or 4096; superp 64 to 32768 (default: roce as the route allows, superp 1024)")
	cli.Choices(c, "transport", traffic.Transports()...)
}

func (t *transportFlags) resolve() (map[string]string, error) {
	if err := cli.OneOf("transport", t.transport, traffic.Transports()...); err != nil {
		return nil, err
	}
	planes, err := traffic.ParsePlanes(t.planes)
	if err != nil {
		return nil, cli.Usage(err, "for example --plane p3=nupa")
	}
	return planes, nil
}

func parseSlots(words []string) (out []traffic.Slot, err error) {
	for _, w := range words {
		s, err := traffic.ParseSlot(w)
		if err != nil {
			return nil, cli.Usage(err, "for example --slot p0=49152 --slot p1=49153*2")
		}
		out = append(out, s)
	}
	return out, nil
}

// runFlags describe a run.
type runFlags struct {
	traffic.Config
	pattern, ordering string
	size, message     byteCount
}

func (r *runFlags) add(e *cli.Env, c *cobra.Command) {
	f := c.Flags()
	r.message = 64 << 10
	f.StringVar(&r.pattern, "pattern", string(traffic.AllToAll), strings.Join(traffic.Patterns(), ", "))
	f.StringVar(&r.Op, "op", "write-imm", strings.Join(traffic.Ops(), ", "))
	f.StringVar(&r.ordering, "ordering", "weak", strings.Join(traffic.Orderings(), ", "))
	f.Var(&r.message, "message", "bytes of a message, such as 4096, 64K or 1M (powers of 1024)")
	f.IntVar(&r.Outstanding, "outstanding", 16, "messages that a pair has in flight at a time")
	f.Var(&r.size, "size", "bytes that each pair sends, rounded up to whole messages (default 64M when there is no --duration)")
	f.DurationVar(&r.Duration, "duration", 0, "how long to send; with --size, until either limit is reached")
	f.DurationVar(&r.Interval, "interval", time.Second, "interval of the time series; at least 1ms")
	f.DurationVar(&r.Stall, "stall", time.Minute, "how long a pair may make no progress before it has failed")
	f.Uint64Var(&r.Seed, "seed", 1, "seed of the messages' content")
	cli.Choices(c, "pattern", traffic.Patterns()...)
	cli.Choices(c, "op", traffic.Ops()...)
	cli.Choices(c, "ordering", traffic.Orderings()...)
	for _, name := range []string{"message", "outstanding", "size", "duration", "interval", "stall", "seed"} {
		cli.Choices(c, name)
	}
	cli.ReadFlags(e, c)
}

func (r *runFlags) resolve() (traffic.Config, error) {
	cfg := r.Config
	for _, flag := range []struct {
		name, value string
		known       []string
	}{{"pattern", r.pattern, traffic.Patterns()}, {"op", r.Op, traffic.Ops()}, {"ordering", r.ordering, traffic.Orderings()}} {
		if err := cli.OneOf(flag.name, flag.value, flag.known...); err != nil {
			return cfg, err
		}
	}
	cfg.Pattern, cfg.Size, cfg.Message = traffic.Pattern(r.pattern), uint64(r.size), int(r.message)
	var err error
	if cfg.Ordering, err = traffic.ParseOrdering(r.ordering); err != nil {
		return cfg, err
	}
	if cfg.Message == 0 || cfg.Outstanding == 0 || cfg.Interval == 0 || cfg.Stall == 0 {
		return cfg, cli.Usage(errors.New("--message, --outstanding, --interval and --stall must not be 0"), "leave them out for their defaults")
	}
	if cfg.Size == 0 && cfg.Duration == 0 {
		cfg.Size = 64 << 20
	}
	if err := cfg.Check(); err != nil {
		return cfg, cli.Usage(err, "'fared traffic run --help' lists the possible values")
	}
	return cfg, nil
}

// byteCount is a number of bytes in a flag.
type byteCount uint64

// byteUnits are powers of 1024, as in sizes of memory.
var byteUnits = []struct {
	letter string
	shift  int
}{{"T", 40}, {"G", 30}, {"M", 20}, {"K", 10}}

func (*byteCount) Type() string { return "bytes" }

func (b *byteCount) String() string {
	for _, u := range byteUnits {
		if *b > 0 && *b%(1<<u.shift) == 0 {
			return fmt.Sprint(*b>>u.shift, u.letter)
		}
	}
	return strconv.FormatUint(uint64(*b), 10)
}

func (b *byteCount) Set(text string) error {
	number, shift := strings.ToUpper(text), 0
	number = strings.TrimSuffix(strings.TrimSuffix(number, "B"), "I")
	for _, u := range byteUnits {
		if rest, ok := strings.CutSuffix(number, u.letter); ok {
			number, shift = rest, u.shift
			break
		}
	}
	n, err := strconv.ParseUint(number, 10, 63)
	if err != nil || n > 1<<62>>shift {
		return errors.New("write a whole number of bytes, such as 4096, 64K, 1M or 2GiB")
	}
	*b = byteCount(n << shift)
	return nil
}

// serverCredentials returns a traffic node's credentials, from the same variables as a client's.
func serverCredentials() ([]grpc.ServerOption, error) {
	cert := os.Getenv("FARED_TLS_CERT")
	if cert == "" {
		return nil, nil
	}
	cfg, err := tlsfiles.Server(cert, os.Getenv("FARED_TLS_KEY"), os.Getenv("FARED_TLS_CA"), nil)
	if err != nil {
		return nil, cli.Usage(err, "FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA name PEM files")
	}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(cfg))}, nil
}
