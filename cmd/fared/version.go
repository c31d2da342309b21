package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/fared/fared/internal/version"
)

func versionCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintf(e.out, "fared %s %s %s/%s\n", version.String(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return err
		},
	}
}
