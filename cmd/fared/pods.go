package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/version"
	"github.com/fared/fared/pods"
	"github.com/fared/fared/pods/cni"
	"github.com/fared/fared/pods/nri"
)

// implied returns the command of a process without arguments that a container runtime has started as its plugin, by a
// link in the runtime's directory of plugins; else args.
func implied(args []string, getenv func(string) string) []string {
	switch {
	case len(args) > 0:
	case getenv("CNI_COMMAND") != "":
		return []string{"cni"}
	case getenv("NRI_PLUGIN_NAME") != "" && getenv("NRI_PLUGIN_SOCKET") != "":
		return []string{"nri"}
	}
	return args
}

func cniCommand(e *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use: "cni", Short: "Attach pods to the planes, as a network plugin (CNI) of a container runtime", Args: cli.NoArgs,
		Long: `Runs one call of the Container Network Interface, versions 0.3.0 to 1.1.0: the runtime describes
it by variables (CNI_COMMAND, ...) and standard input. Chained behind a plugin that puts devices
into a pod, such as host-device or sriov, it makes 'fared dataplane' forward the pod's packets
as it does those of the host. It returns the result of the plugins before it, unchanged.

A link to fared in the runtime's directory is the plugin: without arguments and with CNI_COMMAND
fared runs this command. Keys of the plugin in a network's "plugins", all optional:
  socket    the agent's socket (default ` + pods.DefaultSocket + `)
  wait      how long ADD waits for weights being in effect, at most 30s (default "1s")
  subPorts  sub-ports by the names of devices in the pod, {"net1": "eth0"}, for devices that
            have neither the name of a sub-port nor one as their parent

If the agent is down, the pod starts with a warning, and the agent attaches it when it starts.
DEL never fails. STATUS fails with code 50 while the agent does not answer.
/usr/share/doc/fared/kubernetes.md has complete configurations.`,
		Example: "  ln -s /usr/bin/fared /opt/cni/bin/fared\n  CNI_COMMAND=VERSION fared cni",
		RunE: func(c *cobra.Command, _ []string) error {
			about := "fared " + version.String() + " is a network plugin that a container runtime calls; see 'fared cni --help'"
			failed := cni.Main(c.Context(), e.Err, about)
			if failed == nil {
				return nil
			}
			if err := failed.Print(); err != nil {
				return cli.Failed(err, "the runtime has not received the plugin's error: "+failed.Error())
			}
			return cli.ProgramExit(cli.ExitFailed)
		},
	}
}

func nriCommand(e *cli.Env) *cobra.Command {
	c := nri.Config{}
	var level string
	command := &cobra.Command{
		Use: "nri", Short: "Attach pods to the planes, as a plugin (NRI) of a container runtime", Args: cli.NoArgs,
		Long: `Connects to containerd or CRI-O by the Node Resource Interface and attaches the pods whose
devices are sub-ports to 'fared dataplane', after other plugins, such as DRANET, have put the
devices there. The containers of a pod get its slot table at /run/fared/slots; the first ones
are held until weights are in effect, at most for --wait from the start of the pod.

A pod's annotations decide:
  fared.io/attach: "true"                      attach it, and log a refusal
  fared.io/attach: "false"                     leave it alone
  fared.io/sub-ports: "rail0=eth0,rail1=eth1"  attach these devices, with these sub-ports
Without them a pod is attached that has a hardware device of a sub-port.

If the agent is down, pods start at once with a warning, and are attached when it runs. If the
runtime restarts, nri connects again and attaches the pods that have started meanwhile.

It needs CAP_SYS_ADMIN to read the devices of pods, and access to both sockets. A link to fared
at /opt/nri/plugins/90-fared lets the runtime start it, with the default flags.`,
		Example: "  fared nri\n  ln -s /usr/bin/fared /opt/nri/plugins/90-fared",
		RunE:    func(command *cobra.Command, _ []string) error { return runNRI(command.Context(), e, &c, level) },
	}
	f := command.Flags()
	f.StringVar(&c.Socket, "socket", pods.DefaultSocket, "path of the agent's unix socket")
	f.StringVar(&c.Runtime, "runtime", "/var/run/nri/nri.sock", "path of the runtime's unix socket for plugins")
	f.StringVar(&c.Index, "index", "90", "two digits that place this plugin after those that put devices into pods; a runtime that starts it has its own")
	f.DurationVar(&c.Wait, "wait", time.Second, "limit of the time for which a starting pod's containers are held, and with them other pods of the runtime; at most 30s")
	cli.LevelFlag(command, &level, "info", "")
	return command
}

func runNRI(ctx context.Context, e *cli.Env, c *nri.Config, level string) error {
	if c.Wait < 0 || c.Wait > 30*time.Second {
		return cli.Usage(fmt.Errorf("--wait %s is not from 0s to 30s", c.Wait), "1s is enough for an agent that runs")
	}
	if len(c.Index) != 2 || strings.Trim(c.Index, "0123456789") != "" {
		return cli.Usage(fmt.Errorf("--index %q is not two digits", c.Index), "use 90: plugins that put devices into pods have lower ones")
	}
	for flag, path := range map[string]*string{"socket": &c.Socket, "runtime": &c.Runtime} {
		if *path = strings.TrimPrefix(*path, "unix:"); *path == "" {
			return cli.Usage(errors.New("--"+flag+" is empty"), "name the path of a unix socket")
		}
	}
	l, err := cli.ParseLevel(level)
	if err != nil {
		return err
	}
	log, queue := cli.NewQueuedLogger(e.Err, "text", l)
	defer queue.Close(cli.LogPatience)
	c.Log = log
	if err := nri.Run(ctx, *c); err != nil {
		return cli.Failed(err, "see the messages above; is NRI enabled in the container runtime?")
	}
	return nil
}

// resumePods attaches the pods that started while no agent served a socket, until the returned function is called.
func resumePods(ctx context.Context, socket string, log *slog.Logger) (stop func(), err error) {
	if socket == "" {
		return func() {}, nil
	}
	agent, err := pods.Dial(socket)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		pods.Resume(ctx, agent, pods.Store{Dir: pods.Folder(socket)}, log)
	}()
	return func() {
		cancel()
		<-done
		_ = agent.Close()
	}, nil
}
