//! What the viewer sees: lines, and on a terminal a last line that changes.

use std::io::{self, IsTerminal as _, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use clap::builder::styling::{AnsiColor, Style};
use tokio::sync::watch;

/// Where the demo writes.
pub(super) struct Screen {
    colours: bool,
    /// Whether the last line may change: on a terminal only.
    live: bool,
    state: Mutex<State>,
    failure: watch::Sender<Option<io::ErrorKind>>,
}

struct State {
    out: Box<dyn Write + Send>,
    /// How many characters of the last line are to be written over.
    passing: usize,
}

/// How something is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    /// A title.
    Title,
    /// It went well.
    Good,
    /// Somebody was harmed.
    Bad,
    /// It is not decided yet.
    Open,
    /// Beside the point.
    Faint,
}

impl Screen {
    /// Standard output. Colours only on a terminal, and not where the environment variable `NO_COLOR` is set.
    pub(super) fn stdout() -> Self {
        let terminal = io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self::new(Box::new(io::stdout()), terminal, terminal && wanted)
    }

    fn new(out: Box<dyn Write + Send>, live: bool, colours: bool) -> Self {
        Self { colours, live, state: Mutex::new(State { out, passing: 0 }), failure: watch::Sender::new(None) }
    }

    /// Writes text, each line of it behind what stands there.
    pub(super) fn say(&self, text: &str) {
        self.write(|state| {
            state.wipe()?;
            writeln!(state.out, "{text}")
        });
    }

    /// Writes a line that the next one takes the place of. Nothing where lines cannot change.
    pub(super) fn pass(&self, text: &str) {
        if self.live {
            self.write(|state| {
                state.wipe()?;
                state.passing = text.chars().count();
                write!(state.out, "{text}")
            });
        }
    }

    /// The text in the colour of its tone.
    pub(super) fn paint(&self, tone: Tone, text: &str) -> String {
        if !self.colours {
            return text.to_owned();
        }
        let style = match tone {
            Tone::Title => Style::new().bold(),
            Tone::Good => AnsiColor::Green.on_default(),
            Tone::Bad => AnsiColor::Red.on_default().bold(),
            Tone::Open => AnsiColor::Yellow.on_default(),
            Tone::Faint => Style::new().dimmed(),
        };
        format!("{style}{text}{style:#}")
    }

    /// Returns when nothing can be written any more, and why.
    pub(super) async fn failed(&self) -> io::ErrorKind {
        let mut failure = self.failure.subscribe();
        match failure.wait_for(Option::is_some).await {
            Ok(kind) => kind.unwrap_or(io::ErrorKind::Other),
            // The sender is this screen's own.
            Err(_) => std::future::pending().await,
        }
    }

    fn write(&self, write: impl FnOnce(&mut State) -> io::Result<()>) {
        let mut state = self.lock();
        if let Err(error) = write(&mut state).and_then(|()| state.out.flush()) {
            self.failure.send_replace(Some(error.kind()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Blanks and a return, and no escape: what is no terminal for colours is one for these.
    fn wipe(&mut self) -> io::Result<()> {
        match std::mem::take(&mut self.passing) {
            0 => Ok(()),
            written => write!(self.out, "\r{:written$}\r", ""),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(live: bool, colours: bool, write: impl FnOnce(&Screen)) -> String {
        let out = Written::default();
        write(&Screen::new(Box::new(out.clone()), live, colours));
        String::from_utf8(out.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_passing_line_gives_way() {
        let text = |screen: &Screen| {
            screen.pass("1 of 2");
            screen.pass("2 of 2");
            screen.say("done");
        };
        assert_eq!(written(true, false, text), "1 of 2\r      \r2 of 2\r      \rdone\n");
        assert_eq!(written(false, false, text), "done\n");
    }

    #[test]
    fn colours_are_left_out_where_they_are_not_wanted() {
        let text = |screen: &Screen| screen.say(&screen.paint(Tone::Bad, "twice"));
        assert_eq!(written(true, false, text), "twice\n");
        assert_eq!(written(true, true, text), "\u{1b}[1m\u{1b}[31mtwice\u{1b}[0m\n");
    }

    #[tokio::test]
    async fn what_cannot_be_written_is_noticed() {
        let screen = Screen::new(Box::new(Full), false, false);
        screen.say("lost");
        assert_eq!(screen.failed().await, io::ErrorKind::StorageFull);
    }
}
