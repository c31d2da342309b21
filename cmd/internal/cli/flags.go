package cli

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
)

// DefaultConfig is the configuration file of the units.
const DefaultConfig = "/etc/fared/fared.yaml"

// Choices completes a flag with fixed words.
func Choices(c *cobra.Command, flag string, words ...string) {
	_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// ConfigFlag adds --config to a command.
func ConfigFlag(c *cobra.Command, file *string) {
	c.Flags().StringVarP(file, "config", "c", DefaultConfig, "configuration file")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
}

// LevelFlag adds --log-level to a command; ParseLevel reads its value.
func LevelFlag(c *cobra.Command, level *string, byDefault, more string) {
	c.Flags().StringVar(level, "log-level", byDefault, "debug, info, warn or error"+more)
	Choices(c, "log-level", "debug", "info", "warn", "error")
}

// ParseLevel parses the value of --log-level.
func ParseLevel(text string) (level slog.Level, err error) {
	if level.UnmarshalText([]byte(text)) != nil {
		return level, Usage(fmt.Errorf("--log-level %q: no such level", text), "use debug, info, warn or error")
	}
	return level, nil
}

// ReadFlags adds -o to a command that prints data.
func ReadFlags(e *Env, c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&e.Output, "output", "o", "table", "table, json or yaml")
	Choices(c, "output", "table", "json", "yaml")
	pre := c.PreRunE
	c.PreRunE = func(c *cobra.Command, args []string) error {
		switch e.Output {
		case "table", "json", "yaml":
		default:
			return Usage(fmt.Errorf("--output %q: no such format", e.Output), "use table, json or yaml")
		}
		if pre != nil {
			return pre(c, args)
		}
		return nil
	}
	return c
}

// ConfigError gives an error of a configuration its exit code and a remedy.
func ConfigError(err error) error {
	if err == nil {
		return nil
	}
	remedy := "correct the file; fared.yaml(5) describes every key"
	if errors.Is(err, os.ErrNotExist) {
		remedy = "name the file with --config; 'fared init' writes a first one, and /usr/share/doc/fared/examples has others"
	}
	return Usage(err, remedy)
}
