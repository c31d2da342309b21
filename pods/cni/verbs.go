package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/pods"
)

// check fails unless the devices of the previous result are attached and follow the weights.
func (p *plugin) check(args *skel.CmdArgs) error {
	c, err := p.begin(args)
	if err != nil {
		return err
	}
	defer c.agent.Close()
	result, err := c.config.previous()
	if err != nil {
		return err
	}
	wanted := c.config.devices(result)
	if len(wanted) == 0 {
		return nil
	}
	e, err := c.store.Open(c.container, false)
	if errors.Is(err, fs.ErrNotExist) {
		return c.detached("it has no attachment")
	}
	if err != nil {
		return c.unrecorded(err)
	}
	id := e.Record.ID
	e.Close()
	all, err := c.agent.List(c.ctx)
	if err != nil {
		return types.NewError(types.ErrTryAgainLater, c.unanswered(err), "")
	}
	at := slices.IndexFunc(all, func(a *farev1.Attachment) bool { return a.Id == id })
	if at < 0 {
		return c.detached("the agent does not have its attachment " + id)
	}
	return c.complete(all[at], wanted)
}

// complete fails if an attachment lacks devices or does not follow the weights.
func (c *call) complete(a *farev1.Attachment, wanted []pods.Device) error {
	if a.Error != "" {
		return c.detached(a.Error)
	}
	for _, d := range wanted {
		if !slices.ContainsFunc(a.Devices, func(have *farev1.AttachDevice) bool { return have.Device == d.Name }) {
			return c.detached("device " + d.Name + " is not attached")
		}
	}
	return nil
}

func (c *call) detached(why string) error {
	return types.NewError(types.ErrUnknownContainer, fmt.Sprintf("fared: network %q: pod %s is not attached: %s: restart the pod", c.config.Name, c.container, why), "")
}

func (c *call) unanswered(err error) string {
	return fmt.Sprintf("fared: the agent at %s does not answer: %s: start 'fared dataplane', or correct the key socket of network %q", c.config.Socket, pods.Reason(err), c.config.Name)
}

// gc ends the attachments of this network that are not among the valid ones.
func (p *plugin) gc(args *skel.CmdArgs) error {
	c, err := p.begin(args)
	if err != nil {
		return err
	}
	defer c.agent.Close()
	all, err := c.store.Containers()
	if err != nil {
		return c.unrecorded(err)
	}
	for _, container := range all {
		c.remove(container, func(i pods.Interface) bool {
			return i.Network == c.config.Name && !slices.Contains(c.config.ValidAttachments, types.GCAttachment{ContainerID: container, IfName: i.IfName})
		})
	}
	return nil
}

// status fails if the agent does not serve attachments.
func (p *plugin) status(args *skel.CmdArgs) error {
	c, err := p.begin(args)
	if err != nil {
		return err
	}
	defer c.agent.Close()
	if _, err := c.agent.List(c.ctx); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, c.unanswered(err), "")
	}
	return nil
}

// networkName returns the name of a configuration that has errors.
func networkName(text []byte) string {
	var c struct {
		Name string `json:"name"`
	}
	_ = json.Unmarshal(text, &c) // the runtime's name is a text
	return c.Name
}
