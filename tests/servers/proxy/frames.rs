//! As much of PostgreSQL's protocol (version 3, chapter "Message Formats" of its manual) as it takes to see where an
//! answer ends.

/// What is sent on in one go.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    pub bytes: Vec<u8>,
    /// Where its last message starts, if that is the one which says that a transaction or statement has ended.
    pub ready: Option<usize>,
    /// Whether it comes from a client that asks something of a session.
    pub is_question: bool,
}

/// What has been seen of a connection.
#[derive(Default)]
pub struct Frames {
    stage: Stage,
    /// What the server has sent of an answer that it has not ended yet.
    answer: Vec<u8>,
    /// Where the first message that is not whole starts in there.
    whole: usize,
}

/// How far a connection is.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// Nothing came from the client yet.
    #[default]
    New,
    /// The client asked for encryption: one byte comes as the answer, and it starts anew.
    Encryption,
    /// Until the server is ready for the first time, client and server wait for each other's messages.
    Start,
    /// The server answers questions.
    Session,
    /// Nothing can be seen: it is encrypted, or a request to cancel.
    Opaque,
}

const CANCEL: u32 = 80_877_102;
const TLS: u32 = 80_877_103;
const GSS: u32 = 80_877_104;

impl Frames {
    /// Takes what a client sent.
    pub fn asked(&mut self, bytes: &[u8]) -> Vec<Part> {
        if self.stage == Stage::New && bytes.len() >= 8 {
            self.stage = match u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) {
                TLS | GSS => Stage::Encryption,
                CANCEL => Stage::Opaque,
                _ => Stage::Start,
            };
        }
        let is_question = self.stage == Stage::Session && bytes.first() != Some(&b'X');
        vec![Part { bytes: bytes.to_vec(), ready: None, is_question }]
    }

    /// Takes what a server sent, and gives what can go on. Within a session that is whole answers.
    pub fn answered(&mut self, bytes: &[u8]) -> Vec<Part> {
        let as_it_is = |bytes: &[u8]| Part { bytes: bytes.to_vec(), ready: None, is_question: false };
        match self.stage {
            Stage::New | Stage::Opaque => return vec![as_it_is(bytes)],
            Stage::Encryption => {
                self.stage = if bytes == b"N" { Stage::New } else { Stage::Opaque };
                return vec![as_it_is(bytes)];
            }
            Stage::Start | Stage::Session => {}
        }
        self.answer.extend_from_slice(bytes);
        let mut parts = Vec::new();
        while let Some(end) = self.end_of_message() {
            let start = self.whole;
            let kind = self.answer[start];
            // Between answers: a notification, a warning, a setting that has changed.
            let comes_by_itself = start == 0 && matches!(kind, b'A' | b'N' | b'S');
            let is_ready = kind == b'Z';
            if self.stage == Stage::Start || comes_by_itself || is_ready {
                let rest = self.answer.split_off(end);
                let bytes = std::mem::replace(&mut self.answer, rest);
                let ready = (is_ready && self.stage == Stage::Session).then_some(start);
                parts.push(Part { bytes, ready, is_question: false });
                self.whole = 0;
                if is_ready {
                    self.stage = Stage::Session;
                }
            } else {
                self.whole = end;
            }
        }
        parts
    }

    /// Where the message ends that starts at `whole`, if all of it is there.
    fn end_of_message(&self) -> Option<usize> {
        let length = self.answer.get(self.whole + 1..self.whole + 5)?;
        let length = u32::from_be_bytes([length[0], length[1], length[2], length[3]]) as usize;
        let end = self.whole + 1 + length;
        (self.answer.len() >= end).then_some(end)
    }
}
