// Package cni is the network plugin `fared cni`: chained behind a plugin that moves devices into pods, it attaches the
// pods to the agent.
package cni

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/fared/fared/pods"
)

// Versions are the versions of the specification: chains began with 0.3.
var Versions = version.VersionsStartingFrom("0.3.0")

// plugin is one call.
type plugin struct {
	ctx context.Context
	log io.Writer // warnings
}

// Main runs the call that the environment describes. Its error is that of the protocol, to be printed on standard
// output. Warnings are written to log.
func Main(ctx context.Context, log io.Writer, about string) *types.Error {
	p := &plugin{ctx, log}
	return skel.PluginMainFuncsWithError(skel.CNIFuncs{Add: p.add, Del: p.del, Check: p.check, GC: p.gc, Status: p.status}, Versions, about)
}

func (p *plugin) warn(format string, args ...any) {
	fmt.Fprintf(p.log, "fared: warning: "+format+"\n", args...)
}

// call is a call with the agent and records that its configuration names.
type call struct {
	*plugin
	config    *config
	store     pods.Store
	agent     *pods.Agent
	container string
	args      *skel.CmdArgs
}

// begin reads the configuration. The caller must close the agent.
func (p *plugin) begin(args *skel.CmdArgs) (*call, error) {
	c, err := parse(args.StdinData)
	if err != nil {
		return nil, err
	}
	agent, err := pods.Dial(c.Socket)
	if err != nil {
		return nil, c.refuse("socket: %w", err)
	}
	return &call{plugin: p, config: c, store: pods.Store{Dir: pods.Folder(c.Socket)}, agent: agent, container: args.ContainerID, args: args}, nil
}

// add attaches the devices of the previous result, with those of earlier calls for the pod. If the agent is absent, the
// agent attaches them when it starts.
func (p *plugin) add(args *skel.CmdArgs) error {
	c, err := p.begin(args)
	if err != nil {
		return err
	}
	defer c.agent.Close()
	result, err := c.config.previous()
	if err != nil {
		return err
	}
	devices := c.config.devices(result)
	if len(devices) == 0 {
		p.warn("network %q: the plugins before fared have put no device into the pod, so nothing is attached", c.config.Name)
		return types.PrintResult(c.config.PrevResult, c.config.CNIVersion)
	}
	if err := c.attach(pods.Interface{Network: c.config.Name, IfName: args.IfName, Devices: devices}); err != nil {
		return err
	}
	return types.PrintResult(c.config.PrevResult, c.config.CNIVersion)
}

// attach records an interface and attaches the pod. After a refusal the record is the former one.
func (c *call) attach(i pods.Interface) error {
	e, err := c.store.Open(c.container, true)
	if err != nil {
		return c.unrecorded(err)
	}
	defer e.Close()
	before := e.Record
	before.Interfaces = append([]pods.Interface(nil), before.Interfaces...)
	if e.New || e.Record.Netns != c.args.Netns {
		e.Record = pods.Record{ID: pods.ID(pods.Argument(c.args.Args, "K8S_POD_UID"), c.container), Netns: c.args.Netns}
	}
	e.Record.Set(i)
	if err := e.Save(); err != nil {
		return c.unrecorded(err)
	}
	a, err := c.agent.Attach(c.ctx, e.Record.Request(), c.config.wait)
	switch {
	case err == nil && a.GetError() != "":
		c.warn("pod %s: %s", c.container, a.GetError())
	case err == nil && !a.GetInEffect():
		c.warn("pod %s: no weights are in effect after %s; it starts without them, and they follow", c.container, c.config.wait)
	case err != nil && pods.Absent(err):
		c.warn("pod %s starts without its planes: the agent at %s does not answer (%s); it is attached when 'fared dataplane' runs", c.container, c.config.Socket, pods.Reason(err))
	case err != nil:
		return errors.Join(types.NewError(types.ErrInternal, fmt.Sprintf("fared: network %q: cannot attach %s: %s", c.config.Name, names(i), pods.Reason(err)), ""), c.restore(e, before))
	}
	return nil
}

// restore undoes the record of a refused interface.
func (c *call) restore(e *pods.Entry, before pods.Record) error {
	if e.Record = before; len(before.Interfaces) == 0 {
		return e.Remove()
	}
	return e.Save()
}

func (c *call) unrecorded(err error) error {
	return types.NewError(types.ErrIOFailure, fmt.Sprintf("fared: network %q: cannot record the attachment: %v: the folder of the key socket must be writable", c.config.Name, err), "")
}

func names(i pods.Interface) string {
	var all []string
	for _, d := range i.Devices {
		all = append(all, d.Name)
	}
	return strings.Join(all, ", ")
}

// del detaches. It never fails, because a pod that cannot be deleted blocks its node.
func (p *plugin) del(args *skel.CmdArgs) error {
	c, err := p.begin(args)
	if err != nil {
		p.warn("DEL uses the default socket: %v", err)
		if c, err = p.begin(&skel.CmdArgs{ContainerID: args.ContainerID, Args: args.Args, StdinData: []byte("{}")}); err != nil {
			return nil
		}
		c.config.Name = networkName(args.StdinData)
		c.args = args
	}
	defer c.agent.Close()
	c.remove(c.container, func(i pods.Interface) bool { return i.Network == c.config.Name && i.IfName == args.IfName })
	return nil
}

// remove removes the interfaces of a container that gone reports, and detaches the pod if there are no others.
func (c *call) remove(container string, gone func(pods.Interface) bool) {
	e, err := c.store.Open(container, false)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		c.warn("pod %s stays attached until its network namespace ends: %v", container, err)
		return
	}
	defer e.Close()
	if e.New {
		return
	}
	removed := false
	for _, i := range append([]pods.Interface(nil), e.Record.Interfaces...) {
		if gone(i) {
			removed = e.Record.Remove(i.Network, i.IfName) || removed
		}
	}
	if !removed && len(e.Record.Interfaces) > 0 {
		return
	}
	if _, err := os.Stat(e.Record.Netns); errors.Is(err, fs.ErrNotExist) {
		e.Record.Interfaces = nil
	}
	if err := c.follow(container, e); err != nil {
		c.warn("pod %s: %v; the agent at %s does the rest when it runs, or when the pod's network namespace ends", container, err, c.config.Socket)
	}
}

// follow saves a record that has lost interfaces, and makes the agent follow it. A record without interfaces stays
// until the agent has detached the pod.
func (c *call) follow(container string, e *pods.Entry) error {
	if err := e.Save(); err != nil {
		return err
	}
	if len(e.Record.Interfaces) > 0 {
		_, err := c.agent.Attach(c.ctx, e.Record.Request(), 0)
		return err
	}
	if !c.store.Shared(container, e.Record.ID) {
		if err := c.agent.Detach(c.ctx, e.Record.ID); err != nil {
			return err
		}
	}
	return e.Remove()
}
