package main

import (
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/transport/superp"
)

// sunhFlags choose the encapsulation of SUPERp.
type sunhFlags struct {
	encapsulation, subnet, device string
	etherType                     uint16
}

func (s *sunhFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&s.encapsulation, "superp-encapsulation", "udp", "superp: udp, or sunh for frames without IP, which need CAP_NET_RAW")
	f.StringVar(&s.subnet, "superp-subnet", "", "sunh: the prefix of all loopbacks, with a host part of 8 to 16 bits (default the /16 or /112 of the loopback)")
	f.StringVar(&s.device, "superp-device", "", "sunh: device that steers frames to sub-ports, such as fared0 of 'fared dataplane --driver bpf --sunh' (default each slot's device)")
	f.Uint16Var(&s.etherType, "superp-ethertype", superp.SUNHEtherType, "sunh: EtherType, the same at all nodes: 0x885b as XDP2's, or 0x88b5 or 0x88b6 for experiments")
	cli.Choices(c, "superp-encapsulation", "udp", "sunh")
	for _, name := range []string{"superp-subnet", "superp-device", "superp-ethertype"} {
		cli.Choices(c, name)
	}
}

// config returns the configuration of an endpoint at a loopback.
func (s *sunhFlags) config(loopback netip.Addr) (cfg superp.SUNHConfig, err error) {
	if err := cli.OneOf("superp-encapsulation", s.encapsulation, "udp", "sunh"); err != nil || s.encapsulation == "udp" {
		return cfg, err
	}
	cfg = superp.SUNHConfig{EtherType: s.etherType, Device: s.device, Subnet: netip.PrefixFrom(loopback, loopback.BitLen()-16).Masked()}
	if s.subnet != "" {
		if cfg.Subnet, err = netip.ParsePrefix(s.subnet); err != nil {
			return cfg, cli.Usage(fmt.Errorf("--superp-subnet: %w", err), "give a prefix such as 10.255.0.0/16 or fd00::/112")
		}
	}
	return cfg, nil
}
