package main

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/nupanet"
)

func nupanetCommand(e *cli.Env) *cobra.Command {
	var local, peer, logLevel string
	var size byteCount = 256 << 20
	cfg := nupanet.Config{Memory: nupa.Config{Channels: 16}}
	c := &cobra.Command{
		Use: "nupanet", Short: "Carry TCP/IP between two machines or namespaces through shared memory", Args: cli.NoArgs,
		Long: `Makes a TUN device whose packets go through memory to the device of the fared nupanet at the other
end, as over a cable. Both ends map the same --nupa-file, and name each other by addresses that no
other endpoint of the file has. The device has carrier while both ends run. It gets no addresses; as a
sub-port of a plane it needs a speed in the configuration. Ctrl-C removes it, with exit code 0.

Memory that is not coherent between the processors of the two machines, such as pooled CXL memory
without hardware coherence, needs --non-coherent at both ends. It takes the first 2 MiB, and nothing
else may use the memory. The order of --local and --peer decides which half each end writes.`,
		Example: "  fared nupanet --nupa-file /sys/bus/pci/devices/0000:00:04.0/resource2 --local 192.0.2.1 --peer 192.0.2.2\n  ip addr add 10.0.0.1/30 dev nupanet0",
		RunE: func(c *cobra.Command, _ []string) error {
			level, err := cli.ParseLevel(logLevel)
			if err != nil {
				return err
			}
			cfg.Log = cli.NewLogger(e.Err, level)
			cfg.Memory.Size = int64(size)
			for _, end := range []struct {
				flag, text string
				address    *netip.Addr
			}{{"local", local, &cfg.Local}, {"peer", peer, &cfg.Peer}} {
				if *end.address, err = netip.ParseAddr(end.text); err != nil {
					return cli.Usage(fmt.Errorf("--%s %q is not an address", end.flag, end.text), "for example --local 192.0.2.1 --peer 192.0.2.2, and the reverse at the other end")
				}
			}
			switch {
			case cfg.Local == cfg.Peer:
				return cli.Usage(fmt.Errorf("--local and --peer are both %v", cfg.Local), "name the two ends by different addresses")
			case cfg.Memory.File == "":
				return cli.Usage(fmt.Errorf("no --nupa-file is named"), "name the memory that both ends map")
			}
			if err := nupanet.Run(c.Context(), cfg); err != nil {
				return cli.Failed(err, "it needs CAP_NET_ADMIN and write permission for the memory")
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Memory.File, "nupa-file", "", "file that both ends share, or a device's memory, such as ivshmem's resource2 in sysfs or /dev/dax0.0")
	f.Var(&size, "nupa-size", "size of --nupa-file if this end creates it; a device has its size, and --non-coherent takes 2 MiB")
	f.BoolVar(&cfg.Memory.Shared, "nupa-shared", false, "several machines map the memory behind --nupa-file; always so for a device or with --non-coherent")
	f.BoolVar(&cfg.NonCoherent, "non-coherent", false, "the memory is not coherent between the processors of the two machines: flush their caches")
	f.DurationVar(&cfg.Memory.DeadAfter, "nupa-dead-after", 2*time.Second, "time without a heartbeat after which a peer in shared --nupa-file is dead")
	f.StringVar(&local, "local", "", "address that names this end in the memory")
	f.StringVar(&peer, "peer", "", "address that names the other end")
	f.StringVar(&cfg.Device, "device", "nupanet0", "name of the device")
	f.IntVar(&cfg.MTU, "mtu", 9000, "MTU of the device: at most 65535")
	cli.LevelFlag(c, &logLevel, "info", "")
	cli.Choices(c, "local")
	cli.Choices(c, "peer")
	cli.Choices(c, "device")
	return c
}
