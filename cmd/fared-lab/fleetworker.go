package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/page"
	"github.com/fared/fared/fleet/configmap"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/fleet/etcd"
	"github.com/fared/fared/fleet/worker"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/httpserve"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/kube/apiserver"
)

// etcdStart is the time in which etcd of --etcd-data usually answers.
const etcdStart = 5 * time.Second

// workerOptions are the flags of fared fleet worker.
type workerOptions struct {
	listen, metrics, page, configMap, etcdData, logLevel string
	peers, members                                       []string
	keep                                                 int
	share                                                float64
}

func fleetWorkerCommand(e *cli.Env) *cobra.Command {
	var o workerOptions
	c := &cobra.Command{Use: "worker", Short: "Join the reports of a fabric's nodes, and name the parts at fault"}
	a := addFabricArgs(c)
	c.Long = `Receives the reports of the nodes of the fabric that FILE or flags describe. It stores nothing: nodes
repeat their states when they connect. Of several workers each names the others by --peer, and each
has the whole view.

'fared fleet drain' needs an engine that keeps the drains: --etcd-data runs the program etcd of this
host for a single worker; --etcd names the members of a cluster, --configmap an object of Kubernetes.
--keep-planes and --keep-share are the least that drains leave to every pair; all workers have the same.

FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA name the PEM files of this worker's certificate and
key, and of the authority that signed those of nodes, workers and operators, each of which may ask
and drain. A node's certificate has its name (server17, server17.DOMAIN), for which alone it reports.
Without certificates --listen must be a loopback address. Ctrl-C ends the worker with exit code 0.`
	c.Example = "  fared fleet worker fabric.yaml --etcd-data /var/lib/fared-fleet\n  fared fleet worker fabric.yaml --listen :4798 --peer fleet2.example:4798"
	c.RunE = func(c *cobra.Command, args []string) error {
		level, err := cli.ParseLevel(o.logLevel)
		if err != nil {
			return err
		}
		f, err := a.load(args)
		if err != nil {
			return err
		}
		if !c.Flags().Changed("keep-planes") {
			o.keep = f.Planes - 1
		}
		if err := budgetError(o.keep, f.Planes, o.share); err != nil {
			return err
		}
		if err := o.addressError(); err != nil {
			return err
		}
		cfg := worker.Config{Fabric: f, Peers: o.peers, Budget: drain.Budget{Planes: o.keep, Share: o.share}, Log: cli.NewLogger(e.Err, level)}
		return runWorker(c.Context(), cfg, &o)
	}
	o.flags(c)
	return c
}

// flags adds the flags of a worker.
func (o *workerOptions) flags(c *cobra.Command) {
	c.Flags().StringVar(&o.listen, "listen", defaultWorker, "host:port to listen at")
	c.Flags().StringVar(&o.metrics, "metrics-listen", "", "serve Prometheus at host:port/metrics, and /healthz")
	c.Flags().StringVar(&o.page, "page", "", "host:port of a loopback address to serve the live page at, such as 127.0.0.1:9472")
	c.Flags().StringArrayVar(&o.peers, "peer", nil, "host:port of another worker; may be repeated")
	c.Flags().StringArrayVar(&o.members, "etcd", nil, "URL of a member of etcd that keeps the drains, such as http://127.0.0.1:2379; may be repeated")
	c.Flags().StringVar(&o.etcdData, "etcd-data", "", "directory for drains: run etcd, of this host, for a single worker")
	c.Flags().StringVar(&o.configMap, "configmap", "", "NAMESPACE/NAME of the ConfigMap that keeps the drains, in a pod whose service account may get, create and update it")
	c.Flags().IntVar(&o.keep, "keep-planes", 0, "planes that drains leave to every pair (default all but one)")
	c.Flags().Float64Var(&o.share, "keep-share", 0, "part of the intact bandwidth that drains leave to every pair, 0 to 1")
	cli.LevelFlag(c, &o.logLevel, "info", "")
}

// addressError returns an error of the addresses of this worker, of others and of etcd.
func (o *workerOptions) addressError() error {
	if err := hostPort("--listen", o.listen); err != nil {
		return err
	}
	if err := hostPort("--metrics-listen", cmp.Or(o.metrics, o.listen)); err != nil {
		return err
	}
	for _, p := range o.peers {
		if err := hostPort("--peer", p); err != nil {
			return err
		}
	}
	for _, m := range o.members {
		if u, err := url.Parse(m); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
			return cli.Usage(fmt.Errorf("--etcd %q is no URL of http or https", m), "write http://127.0.0.1:2379, once for each member")
		}
	}
	return nil
}

// hostPort returns an error of a flag's value that is not host:port.
func hostPort(flag, value string) error {
	_, port, err := net.SplitHostPort(value)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return cli.Usage(fmt.Errorf("%s %q: %w", flag, value, err), "write host:port, such as fleet1.example:4798")
	}
	return nil
}

// runWorker runs a worker with the credentials of the environment.
func runWorker(ctx context.Context, cfg worker.Config, o *workerOptions) error {
	secure, client, err := workerTLS(&cfg)
	if err != nil {
		return cli.Usage(err, "FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA name PEM files")
	}
	if cfg.Engine, err = engineOf(o, cfg.Fabric.Name, client); err != nil {
		return err
	}
	if o.etcdData != "" {
		m, err := etcd.NewMember(o.etcdData, cfg.Log)
		if err != nil {
			return cli.Usage(fmt.Errorf("--etcd-data: %w", err), "or name a cluster by --etcd")
		}
		cfg.Engine = m.Key(keyOf(cfg.Fabric.Name))
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() { defer close(ended); m.Run(ctx) }()
		defer func() { cancel(); <-ended }()
		m.Await(ctx, etcdStart)
	}
	l, options, err := grpcserve.Open(o.listen, secure)
	if errors.Is(err, grpcserve.ErrReachable) {
		return cli.Usage(fmt.Errorf("--listen %s %w, and there is no TLS", o.listen, err), "set FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA, or listen at 127.0.0.1")
	}
	if err != nil {
		return cli.Failed(err, "choose another --listen")
	}
	defer l.Close()
	w := worker.New(cfg)
	if o.metrics != "" {
		m, err := net.Listen("tcp", o.metrics)
		if err != nil {
			return cli.Failed(fmt.Errorf("--metrics-listen: %w", err), "choose another address")
		}
		defer serveHTTP(m, w.MetricsHandler(), cfg.Log)()
	}
	if o.page != "" {
		ended, err := servePage(ctx, w, o.page)
		if err != nil {
			return err
		}
		defer ended()
	}
	cfg.Log.Info("the worker listens", "address", l.Addr().String(), "fabric", cfg.Fabric.Name)
	return w.Serve(ctx, l, options...)
}

// engineOf returns the engine of drains that flags name, nil without one.
func engineOf(o *workerOptions, fabric string, secure *tls.Config) (drain.Engine, error) {
	if o.etcdData != "" && (o.configMap != "" || len(o.members)+len(o.peers) > 0) {
		return nil, cli.Usage(errors.New("--etcd-data is for a single worker, without --peer, --etcd and --configmap"), "name a cluster by --etcd for several workers")
	}
	if o.configMap == "" && len(o.members) == 0 {
		return nil, nil
	}
	if o.configMap == "" {
		return &etcd.Key{Endpoints: o.members, Name: keyOf(fabric), Client: &http.Client{Transport: &http.Transport{TLSClientConfig: secure}}}, nil
	}
	namespace, object, ok := strings.Cut(o.configMap, "/")
	if !ok || namespace == "" || object == "" || strings.Contains(object, "/") || len(o.members) > 0 {
		return nil, cli.Usage(fmt.Errorf("--configmap %q is no NAMESPACE/NAME, or comes with --etcd", o.configMap), "write --configmap fared/drains alone")
	}
	api, err := apiserver.InCluster()
	if err != nil {
		return nil, cli.Usage(err, "--etcd keeps drains outside of Kubernetes")
	}
	return &configmap.Object{API: api, Namespace: namespace, Name: object}, nil
}

// keyOf returns the name of the key of etcd that has a fabric's drains.
func keyOf(fabric string) string { return "/fared/" + fabric + "/drains" }

// workerTLS returns the TLS configurations of a worker as server and as client, nil without certificates, and sets the
// credentials of its connections to others.
func workerTLS(cfg *worker.Config) (server, client *tls.Config, err error) {
	cfg.Credentials = insecure.NewCredentials()
	cert, key, ca := os.Getenv("FARED_TLS_CERT"), os.Getenv("FARED_TLS_KEY"), os.Getenv("FARED_TLS_CA")
	if cert == "" {
		return nil, nil, nil
	}
	if server, err = tlsfiles.Server(cert, key, ca, cfg.Log); err != nil {
		return nil, nil, err
	}
	if cfg.Credentials, err = tlsfiles.Credentials(cert, key, ca, cfg.Log); err != nil {
		return nil, nil, err
	}
	client, err = tlsfiles.Client(cert, key, ca)
	return server, client, err
}

// serveHTTP serves metrics until the returned function is called.
func serveHTTP(l net.Listener, h http.Handler, log *slog.Logger) (stop func()) {
	s := httpserve.New(h)
	go func() {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics are no longer served", "error", err)
		}
	}()
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if s.Shutdown(ctx) != nil {
			s.Close()
		}
	}
}

// servePage serves the page until ctx ends or the returned function is called.
func servePage(ctx context.Context, w *worker.Worker, address string) (end func(), err error) {
	h, err := w.PageHandler()
	if err != nil {
		return nil, cli.Failed(err, "")
	}
	l, err := page.Listen(address)
	if err != nil {
		return nil, cli.Usage(fmt.Errorf("--page: %w", err), "use a free port of a loopback address, such as 127.0.0.1:9472")
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := page.Serve(ctx, l, h); err != nil {
			w.Log.Error("the page is no longer served", "error", err)
		}
	}()
	return func() { cancel(); <-done }, nil
}
