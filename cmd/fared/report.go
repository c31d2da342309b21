package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/fared/fared/cmd/internal/cli"
	fleetreport "github.com/fared/fared/fleet/report"
	"github.com/fared/fared/internal/tlsfiles"
)

func reportCommand(e *cli.Env) *cobra.Command {
	var workers []string
	var logLevel string
	c := &cobra.Command{
		Use: "report --worker ADDRESS", Short: "Report the daemon's state to the workers of a fleet", Args: cli.NoArgs,
		Long: `Reads the daemon at --socket and sends its sub-ports, sessions, bandwidths, proofs and drains to a
worker of 'fared fleet worker': all at each connection, then the changes. Each server and each
leaf of fared runs one. The worker is the one of the list that the node's identifier selects; if
it does not answer, the next one.

FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA name the PEM files of this node's certificate and
key, and of the authority that signed the workers'. Without them workers must have loopback
addresses. Ctrl-C ends the reports with exit code 0.`,
		Example: "  fared report --worker fleet1.example:4798 --worker fleet2.example:4798",
		RunE: func(c *cobra.Command, _ []string) error {
			level, err := cli.ParseLevel(logLevel)
			if err != nil {
				return err
			}
			cfg := fleetreport.Config{Workers: workers, Log: cli.NewLogger(e.Err, level)}
			if cfg.Credentials, err = workerCredentials(workers); err != nil {
				return err
			}
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			cfg.Daemon = conn
			if err := fleetreport.Run(c.Context(), cfg); err != nil {
				return cli.Failed(err, "'fared status' shows the node's identifier; workers log refusals")
			}
			return nil
		},
	}
	c.Flags().StringArrayVar(&workers, "worker", nil, "host:port of a worker; may be repeated")
	cli.LevelFlag(c, &logLevel, "info", "")
	return c
}

// workerCredentials returns the credentials of connections to workers.
func workerCredentials(workers []string) (credentials.TransportCredentials, error) {
	if len(workers) == 0 {
		return nil, cli.Usage(errors.New("no worker is given"), "--worker fleet1.example:4798, once for each worker")
	}
	cert := os.Getenv("FARED_TLS_CERT")
	for _, w := range workers {
		host, _, err := net.SplitHostPort(w)
		if err != nil {
			return nil, cli.Usage(fmt.Errorf("--worker %q: %w", w, err), "write host:port, such as fleet1.example:4798")
		}
		if a, err := netip.ParseAddr(host); cert == "" && (err != nil || !a.IsLoopback()) {
			return nil, cli.Usage(fmt.Errorf("--worker %s is on another host, and this node has no certificate", w), "set FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA")
		}
	}
	if cert == "" {
		return insecure.NewCredentials(), nil
	}
	creds, err := tlsfiles.Credentials(cert, os.Getenv("FARED_TLS_KEY"), os.Getenv("FARED_TLS_CA"), nil)
	if err != nil {
		return nil, cli.Usage(err, "FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA name PEM files")
	}
	return creds, nil
}
