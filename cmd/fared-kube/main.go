// Command fared-kube shows the planes of a node to Kubernetes and NVSentinel. The chart runs it next to the daemon,
// which links none of it.
package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/client"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/version"
	"github.com/fared/fared/kube"
	"github.com/fared/fared/kube/apiserver"
	"github.com/fared/fared/kube/sentinel"
)

func main() { cli.Main(newRoot) }

const about = `fared-kube shows the planes of a Kubernetes node: as a FaredNodeState, node conditions and
labels, taints of devices, and events of NVSentinel. It is a container of fared's chart.`

func newRoot(e *cli.Env) *cobra.Command {
	root := cli.NewRoot(e, "Shows the planes of a node to Kubernetes", about, []cli.Group{
		{ID: "daemon", Title: "Daemons:", Commands: []*cobra.Command{runCommand(e), holdCommand()}},
		{ID: "other", Title: "Other commands:", Commands: []*cobra.Command{cli.VersionCommand(e)}},
	})
	root.Use = "fared-kube"
	root.SetHelpCommandGroupID("other")
	root.CompletionOptions.DisableDefaultCmd = true // only containers run the program
	return root
}

// options are the flags of run.
type options struct {
	node, sentinel, taints, effect, shutdown, metrics string
	unusable                                          int
	labels, drains, cordoned                          bool
}

func runCommand(e *cli.Env) *cobra.Command {
	var o options
	c := &cobra.Command{
		Use: "run", Short: "Show the planes of this node until the end of the process", Args: cli.NoArgs,
		Long: `Writes the status of the FaredNodeState with the node's name, and the node conditions
PlanesDegraded and PlanesUnusable, with the service account of the pod. A lost or returned plane is
written at once, other changes at most every 10 s; 0.1 writes a second are never exceeded for long.`,
		Example: `  fared-kube run --node gpu-7 --taints dra.net`,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			return o.run(c, e)
		},
	}
	f := c.Flags()
	f.StringVar(&o.node, "node", "", "name of this node")
	f.IntVar(&o.unusable, "unusable-below", 50, "share of planes, in percent, below which the node has the condition PlanesUnusable")
	f.BoolVar(&o.labels, "labels", false, "label the node with its planes and rails")
	f.BoolVar(&o.drains, "drains", false, "drain by the node's annotation fared.io/drain and FaredDrains; needs the operators' --socket")
	f.BoolVar(&o.cordoned, "drain-cordoned", false, "drain the planes of a cordoned node, except the last ones of a destination; needs the operators' --socket")
	f.StringVar(&o.shutdown, "drain-at-shutdown", "", "drain all planes at the end of the process if the node shuts down; until then the file exists, for 'fared-kube hold'")
	f.StringVar(&o.taints, "taints", "", "DRA driver whose devices are tainted while their rail has no plane")
	f.StringVar(&o.effect, "taint-effect", "NoSchedule", "effect of taints: NoSchedule, NoExecute or None")
	f.StringVar(&o.sentinel, "nvsentinel", "", "socket of NVSentinel's platform connector, which gets health events")
	f.StringVar(&o.metrics, "metrics-listen", "", "serve Prometheus at host:port/metrics")
	return c
}

func holdCommand() *cobra.Command {
	var file string
	var limit time.Duration
	c := &cobra.Command{
		Use: "hold", Short: "Wait until the planes of a node that shuts down are drained", Args: cli.NoArgs,
		Long: `The preStop hook of the daemons' containers: without the file of 'fared-kube run --drain-at-shutdown',
as in an upgrade, it returns at once.`,
		Example: `  fared-kube hold --file /run/fared-kube/leaving --limit 25s`,
		RunE: func(c *cobra.Command, _ []string) error {
			if file == "" {
				return cli.Usage(errors.New("--file is missing"), "name the file of 'fared-kube run --drain-at-shutdown'")
			}
			kube.Hold(c.Context(), file, limit)
			return nil
		},
	}
	c.Flags().StringVar(&file, "file", "", "file that exists until the planes are drained")
	c.Flags().DurationVar(&limit, "limit", 25*time.Second, "longest wait")
	return c
}

// check refuses wrong flags.
func (o *options) check() error {
	if o.node == "" {
		return cli.Usage(errors.New("--node is missing"), "name the node: --node gpu-7")
	}
	if o.unusable < 0 || o.unusable > 100 {
		return cli.Usage(fmt.Errorf("--unusable-below %d is no share", o.unusable), "use 0 to 100 percent")
	}
	return cli.OneOf("taint-effect", o.effect, "NoSchedule", "NoExecute", "None")
}

// run shows the planes until the context of the command ends.
func (o *options) run(c *cobra.Command, e *cli.Env) error {
	api, err := apiserver.InCluster()
	if err != nil {
		return cli.Usage(err, "run it in a pod, as the chart does")
	}
	socket := ""
	if c.Flags().Changed("socket") || os.Getenv("FARED_SOCKET") != "" {
		socket = e.Socket
	}
	conn, err := client.Dial(socket)
	if err != nil {
		return cli.Usage(err, "--socket takes a unix socket's path")
	}
	defer conn.Close()
	options := kube.Options{Node: o.node, Version: version.String(), Daemon: conn, API: api, UnusableBelow: o.unusable, Labels: o.labels, Drains: o.drains,
		DrainCordoned: o.cordoned, AtShutdown: o.shutdown, Taints: o.taints, TaintEffect: o.effect, Log: cli.NewLogger(e.Err, slog.LevelInfo), Sys: "/sys"}
	if o.sentinel != "" {
		if options.Sentinel, err = sentinel.Dial(o.sentinel); err != nil {
			return cli.Usage(err, "--nvsentinel takes a unix socket's path")
		}
		defer options.Sentinel.Close()
	}
	agent := kube.New(options)
	if o.metrics != "" {
		if err := agent.ServeMetrics(o.metrics); err != nil {
			return fmt.Errorf("--metrics-listen: %w", err)
		}
	}
	agent.Run(c.Context())
	return nil
}
