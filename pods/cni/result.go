package cni

import (
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/fared/fared/pods"
)

// previous returns the result of the plugins before this one.
func (c *config) previous() (*current.Result, error) {
	if c.RawPrevResult == nil {
		return nil, c.refuse(`there is no prevResult: in "plugins", put fared behind the plugin that moves the device, such as host-device or sriov`)
	}
	if err := version.ParsePrevResult(&c.PluginConf); err != nil {
		return nil, c.refuse("prevResult: %w", err)
	}
	result, err := current.NewResultFromResult(c.PrevResult)
	if err != nil {
		return nil, c.refuse("prevResult: %w", err)
	}
	return result, nil
}

// devices returns the devices of a result that are in the pod.
func (c *config) devices(result *current.Result) (devices []pods.Device) {
	inside := func(i *current.Interface) bool { return i.Sandbox != "" && i.Name != "" && i.Name != "lo" }
	for _, i := range result.Interfaces {
		if inside(i) && !slices.ContainsFunc(devices, func(d pods.Device) bool { return d.Name == i.Name }) {
			devices = append(devices, pods.Device{Name: i.Name, SubPort: c.SubPorts[i.Name]})
		}
	}
	return devices
}
