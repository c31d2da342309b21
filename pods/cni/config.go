package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/fared/fared/internal/spelling"
	"github.com/fared/fared/pods"
)

const (
	defaultWait = time.Second
	mostWait    = 30 * time.Second
)

// ownKeys are the keys of this plugin.
var ownKeys = []string{"socket", "wait", "subPorts"}

// config is the configuration of the plugin in a network.
type config struct {
	types.PluginConf
	// Socket is the path of the agent's socket.
	Socket string `json:"socket"`
	// Wait limits the time for which ADD waits for weights, such as "1s".
	Wait string `json:"wait"`
	// SubPorts are the sub-ports of devices, by their names in the pod.
	SubPorts map[string]string `json:"subPorts"`

	wait time.Duration
}

// parse reads the configuration. The error names the network and the key.
func parse(text []byte) (*config, error) {
	c := &config{}
	if err := json.Unmarshal(text, c); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) {
			err = fmt.Errorf("%s has a %s", wrong.Field, wrong.Value)
		}
		return nil, c.refuse("%w: socket and wait are texts, subPorts has the names of devices and their sub-ports", err)
	}
	if err := c.misspelled(text); err != nil {
		return nil, err
	}
	if c.Socket == "" {
		c.Socket = pods.DefaultSocket
	}
	if !filepath.IsAbs(c.Socket) {
		return nil, c.refuse("socket %q is no absolute path: name the agent's unix socket, or omit the key for %s", c.Socket, pods.DefaultSocket)
	}
	c.wait = defaultWait
	if c.Wait != "" {
		var err error
		if c.wait, err = time.ParseDuration(c.Wait); err != nil || c.wait < 0 || c.wait > mostWait {
			return nil, c.refuse("wait %q is not a duration from 0s to %s, such as 1s", c.Wait, mostWait)
		}
	}
	return c, nil
}

// misspelled refuses a key that resembles one of this plugin's; others are those of runtimes.
func (c *config) misspelled(text []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		return c.refuse("%w", err)
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		for _, own := range ownKeys {
			if key != own && spelling.Distance(strings.ToLower(key), strings.ToLower(own), 2) < 2 {
				return c.refuse("key %q is unknown: did you mean %q?", key, own)
			}
		}
	}
	return nil
}

// refuse returns an error about the configuration.
func (c *config) refuse(format string, args ...any) error {
	return types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("fared: network %q: %s", c.Name, fmt.Errorf(format, args...)), "")
}
