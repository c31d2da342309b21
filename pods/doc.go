// Package pods keeps the attachments of pods to the agent: what a network plugin has asked for is in a file until the
// plugin is asked to undo it, so that a plugin that runs for a moment can merge the calls for several interfaces of a
// pod, and an agent that was absent meanwhile attaches and detaches later.
package pods
