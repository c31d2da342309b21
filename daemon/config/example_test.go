package config_test

import (
	"errors"
	"fmt"

	"github.com/fared/fared/daemon/config"
)

const file = `as: 4200000001
loopbacks: [10.255.0.1/32]
accept: [10.255.0.0/16]
planes:
  - name: p0
    sub_ports:
      - {device: eth0, speed: 400G, sessions: [{peer: 10.0.0.0}]}
`

// Parse returns the configuration with all defaults, or every mistake with its position and remedy.
func ExampleParse() {
	c, err := config.Parse("fared.yaml", []byte(file))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(c.Role, c.RouterID, c.BGP.HoldTime, c.Planes[0].SubPorts[0].Device)

	_, err = config.Parse("fared.yaml", []byte(file+"drain_delya: 5\n"))
	var mistakes config.Errors
	if errors.As(err, &mistakes) {
		for _, m := range mistakes {
			fmt.Println(m)
		}
	}
	// Output:
	// server 10.255.0.1 9s eth0
	// fared.yaml:8:1: drain_delya: is not a known key, did you mean "drain_delay"?
}

// Diff returns the values that a reload changes, or an error with those that need a restart.
func ExampleDiff() {
	before, err := config.Parse("fared.yaml", []byte(file))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, added := range []string{"drain_delay: 1s\n", "bgp: {hold_time: 30s}\n"} {
		after, err := config.Parse("fared.yaml", []byte(file+added))
		if err != nil {
			fmt.Println(err)
			return
		}
		changes, err := config.Diff(before, after)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(changes)
	}
	// Output:
	// drain_delay: 5s -> 1s
	// nothing was changed: these keys need a restart of fared:
	//   bgp.hold_time: 9s -> 30s
	//   bgp.keepalive_interval: 3s -> 10s
}
