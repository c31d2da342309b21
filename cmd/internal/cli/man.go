package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/fared/fared/internal/version"
)

// ManCommand writes the manual pages that packages contain, without those that another program writes.
func ManCommand(e *Env, elsewhere ...string) *cobra.Command {
	return &cobra.Command{
		Use:   "man DIR",
		Short: "Write a manual page for each command",
		Long: `Writes a manual page of section 1 for each command to DIR, which it creates if needed. The
date of the pages is SOURCE_DATE_EPOCH, in seconds since 1970, if it is set, and otherwise today.`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			date := time.Now()
			if epoch := os.Getenv("SOURCE_DATE_EPOCH"); epoch != "" {
				seconds, err := strconv.ParseInt(epoch, 10, 64)
				if err != nil {
					return Usage(fmt.Errorf("SOURCE_DATE_EPOCH %q is not a number of seconds", epoch), "")
				}
				date = time.Unix(seconds, 0).UTC()
			}
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return Failed(err, "")
			}
			root := c.Root()
			root.DisableAutoGenTag = true
			header := &doc.GenManHeader{Section: "1", Date: &date, Source: "fared " + version.String(), Manual: "fared"}
			if err := writePages(root, header, args[0], elsewhere); err != nil {
				return Failed(err, "")
			}
			pages, err := filepath.Glob(filepath.Join(args[0], "fared*.1"))
			if err != nil {
				return err
			}
			fmt.Fprintf(e.Out, "%d pages in %s\n", len(pages), args[0])
			return nil
		},
	}
}

// writePages writes the pages of a command and those below it, without those in elsewhere.
func writePages(c *cobra.Command, header *doc.GenManHeader, dir string, elsewhere []string) error {
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() && !sub.IsAdditionalHelpTopicCommand() {
			if err := writePages(sub, header, dir, elsewhere); err != nil {
				return err
			}
		}
	}
	name := strings.ReplaceAll(c.CommandPath(), " ", "-")
	if slices.Contains(elsewhere, name) {
		return nil
	}
	var page bytes.Buffer
	own := *header // GenMan completes it
	if err := doc.GenMan(c, &own, &page); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".1"), page.Bytes(), 0o644)
}
