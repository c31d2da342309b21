package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/fared/fared/internal/version"
)

// VersionCommand prints the version.
func VersionCommand(e *Env) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: NoArgs,
		Example: "  fared version",
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(e.Out, versionLine())
			return err
		},
	}
}

// versionLine is the output of 'fared version' and 'fared --version'.
func versionLine() string {
	return fmt.Sprintf("fared %s %s %s/%s", version.String(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
