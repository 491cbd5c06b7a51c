"""Texts of games, as people and programs write them: read as the same moves, or refused with the reason."""

from __future__ import annotations

import chess
import pytest

from shardwise.tasks.chess.movetext import NotAGame, plies, read_game, read_games
from shardwise.tasks.chess.moveword import first_move_of, read_move

OPENING = ["e2e4", "e7e5", "g1f3", "b8c6"]


def moves(text: str) -> list[str]:
    return [ply.move.uci() for ply in plies(text)]


@pytest.mark.parametrize(
    "text",
    [
        "e2e4 e7e5 g1f3 b8c6",
        "E2E4 E7E5 G1F3 B8C6",
        "e2-e4 e7-e5 Ng1-f3 Nb8-c6",
        "e4 e5 Nf3 Nc6",
        "1. e4 e5 2. Nf3 Nc6 1-0",
        "1.e4 e5 2.Nf3 Nc6 *",
        "1 e4 e5 2 Nf3 Nc6",
        "1. e4 1... e5 2. Nf3 2... Nc6 1/2-1/2",
        "1. e4 1…e5 2. Nf3 2. ... Nc6 ½-½",
        "1. e4 2. e5 3. Nf3 4. Nc6",
        "1. e4! e5?? 2. Nf3!? $14 Nc6 ± 0–1",
        "1. e4 {[%clk 0:10:00] best (by test} e5 (1... c5 2. Nf3 (2. c3 {Alapin)}) 2... d6) 2. Nf3 (2. f4 1-0) Nc6",
        "1. e4 e5 ; Nf6 is Alekhine's\n% no move\n2. Nf3 Nc6\n",
        '[Event "a \\"b\\""]\n[White "the "great" one"]\n\n1. e4 e5 2. ♘f3 ♞c6 1-0',
        "1-0 e4 e5 Nf3 Nc6",
        "1. e4□ e5∞ 2. Nf3⩲ ± Nc6+− ∓ =∞ 1–0",
        "1. e2–e4 e7−e5 2. Nf3+/- → Nc6!?-+ 0‑1",
        "e4 e5 Nf3 Nc6 0.5–0.5",
        "1. e4 e5 2. Nf3 Nc6 1 – 0",
        '[Variant "Standard Chess"]\n1. e4 e5 2. Nf3 Nc6 ½−½',
    ],
)
def test_the_same_moves_are_read_however_they_are_written(text: str) -> None:
    assert moves(text) == OPENING


def test_the_characters_that_say_a_move_are_known() -> None:
    text = "1.e4! {x} e5 2.Nf3 Nc6"
    assert [text[ply.start : ply.end] for ply in plies(text)] == ["e4!", "e5", "Nf3", "Nc6"]


def test_castling_is_one_move_however_it_is_written() -> None:
    before = "e4 e5 Nf3 Nf6 Bc4 Bc5"
    for castling in ("e1g1 e8g8", "e1h1 e8h8", "O-O O-O", "0-0 0-0!", "o-o OO", "e1-h1 O-O+", "O–O 0−0", "00 О-О"):
        assert moves(f"{before} {castling}")[-2:] == ["e1g1", "e8g8"], castling
    long = "d4 d5 Nc3 Nc6 Bf4 Bf5 Qd2 Qd7"
    for castling in ("e1c1 e8c8", "e1a1 e8a8", "O-O-O 0-0-0", "000 0–0–0"):
        assert moves(f"{long} {castling}")[-2:] == ["e1c1", "e8c8"], castling


def test_a_rook_that_goes_where_castling_would_is_a_rook() -> None:
    assert moves('[FEN "3k4/8/8/8/8/8/6K1/4R3 w - - 0 1"]\ne1h1') == ["e1h1"]


def test_promotion_and_en_passant_are_read_in_all_notations() -> None:
    start = '[FEN "8/P6k/8/8/8/8/8/K7 w - - 0 1"]\n'
    for word in ("a7a8q", "a7a8Q", "a8=Q", "a8Q", "a7-a8=Q"):
        assert moves(start + word) == ["a7a8q"], word
    for word in ("dxc6", "dxc6e.p.", "dxc6 e.p.", "dxc6ep", "d5c6"):
        assert moves(f"e4 d5 exd5 c5 {word}")[-1] == "d5c6", word


def test_a_bishops_move_from_a_rank_is_not_taken_for_a_pawns_in_capitals() -> None:
    assert moves('[FEN "4k3/8/8/8/1B6/8/1B6/4K3 w - - 0 1"]\nB4c3') == ["b4c3"]
    with pytest.raises(NotAGame):
        moves('[FEN "4k3/8/8/8/1B6/8/1B6/4K3 w - - 0 1"]\nBc3')  # either could


@pytest.mark.parametrize(
    ("text", "reason", "at"),
    [
        ("e2e5", "'e2e5' is not a legal move after 0 half-moves", "e2e5"),
        ("1. e4 e5 2. Ke3", "'Ke3' is not a legal move after 2 half-moves", "Ke3"),
        ("f3 e5 g4 Qh4# a3", "'a3' is not a legal move after 4 half-moves", "a3"),  # it is mate
        ("e4 --", "'--' is not a legal move after 1 half-moves", "--"),
        ("e4 0000", "'0000' is not a legal move after 1 half-moves: it says that a side passes (a null move)", "0000"),
        ("1. e4 e5 3.Nf3", "move number 3 ('3.Nf3') stands where 2 is due, after 2 half-moves", "3.Nf3"),
        ("1. e4 e5 2020.01.03", "'2020.01.03' is not a legal move after 2 half-moves", "2020"),
        ("0. e4 e5", "move number 0 stands where 1 is due, after 0 half-moves", "0."),
        (
            "d4 d5 Nf3 e6 Nd2",
            "'Nd2' is not a legal move after 4 half-moves: it is ambiguous, more than one piece",
            "Nd2",
        ),
        (
            "e4 d5 exd5 c6 dxc6 a6 cxb7 h6 bxa8",
            "'bxa8' is not a legal move after 8 half-moves: it does not say what the pawn becomes (bxa8=Q)",
            "bxa8",
        ),
        ('[FEN "8/P6k/8/8/8/8/8/K7 w - - 0 1"]\na7a8', "it does not say what the pawn becomes (a7a8q)", "a7a8"),
        ("e4 Z0", "'Z0' is not a legal move", "Z0"),
        ("e2e4 @@@@", "'@@@@' is not a legal move", "@@@@"),
        ("e4 N@f6", "'N@f6' is not a legal move", "N@f6"),
        ("nf3", "'nf3' is not a legal move", "nf3"),
        ("Sf3", "'Sf3' is not a legal move", "Sf3"),
        ("e2e4;e7e5;g1f3", "'e2e4;e7e5;g1f3' is not a legal move", "e2e4"),
        (
            "e4 ; and all that follows e5",
            "a comment that begins with ; ends with its line, and the text has no other",
            ";",
        ),
        ("once upon a time", "'once' is not a legal move", "once"),
        ("1. e4 e5 3. Nf3 Nc6", "move number 3 stands where 2 is due, after 2 half-moves", "3."),
        ("e4 e5 7. Nf3 Nc6", "move number 7 stands where 2 is due", "7."),
        ("1... e5", "1... says that it is Black's move, but it is White's", "1..."),
        ("e4 e5 1-0 0-1", "a second result follows the first: 0-1", "0-1"),
        ("e4 {e5 Nf3", "a comment begins here with { and is not closed", "{"),
        ("e4 } e5", "a comment ends here with } and did not begin", "}"),
        ("e4 (d4 (c4) e5", "a variation begins here with ( and is not closed", "("),
        ("e4 ) e5", "a variation ends here with ) and did not begin", ")"),
        ('[Variant "Crazyhouse"]\n1. e4', "this is a game of Crazyhouse; those of chess and Chess960 are read", "1."),
        ('[Variant "Chess960"]\n1. e4', "a game of Chess960 has to say its first position", "1."),
        ('[FEN "nonsense"]\ne4', "'nonsense' is not a position of chess", "e4"),
        ('[FEN "8/8/8/8/8/8/8/8 w - - 0 1"]\ne4', "is not a position that can be played from", "e4"),
    ],
)
def test_what_is_no_game_is_refused_with_the_reason_and_the_place(text: str, reason: str, at: str) -> None:
    with pytest.raises(NotAGame) as refusal:
        read_games(text)
    assert reason in str(refusal.value)
    assert text[refusal.value.place :].startswith(at)


@pytest.mark.parametrize(
    "text",
    [
        f"1. e4 {'e' * 9999}",
        f"1. e4 e5 {'9' * 999}.Nf3",
        f"1. e4 e5 2. Nf3 Nc6 1. e4{'!' * 999}",
        f'[FEN "{"8/" * 999}"]\n1. e4',
        f'[FEN "8/8/8/8/8/8/8/8 w - - 0 1{" " * 99}{"1" * 999}"]\n1. e4',
        f'[Variant "{"x" * 999}"]\n1. e4',
    ],
)
def test_what_is_quoted_is_cut(text: str) -> None:
    with pytest.raises(NotAGame) as refusal:
        read_game(text)
    assert "…" in str(refusal.value) or text.startswith("[Variant")
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "1. e4 e5 2. Nf3 Nc6 1. d4 d5",
        "1. e4 e5 2. Nf3 Nc6 1-0 1. d4 d5 0-1",
        "e4 e5 Nf3 Nc6 1/2-1/2 d4 d5",
        "e4 e5 Nf3 Nc6 ½ - ½ d4 d5",
        "e4 e5 Nf3 Nc6 * d4 d5",
        "1. e4 e5 2. Nf3 Nc6\n1. d4 d5",
        '[Event "a"]\n1. e4 e5 2. Nf3 Nc6\n\n[Event "b"]\n1. d4 d5',
    ],
)
def test_two_games_in_one_text_are_seen(text: str) -> None:
    assert [game.uci for game in read_games(text)] == ["e2e4 e7e5 g1f3 b8c6", "d2d4 d7d5"]
    with pytest.raises(NotAGame, match="there are 2 games in one text: after 4 half-moves another begins with 'd4'"):
        read_game(text)


def test_games_joined_without_a_sign_are_seen_where_the_rest_is_a_game_from_the_start() -> None:
    joined = "e2e4 e7e5 g1f3 b8c6 e2e4 c7c5 g1f3 d7d6"
    assert [game.uci for game in read_games(joined)] == ["e2e4 e7e5 g1f3 b8c6", "e2e4 c7c5 g1f3 d7d6"]
    assert len(read_games(" ".join([joined] * 300))) == 600
    for illegal in ("e2e4 e7e5 g1f3 b8c6 e2e4 c7c5", "e2e4 e7e5 g1f3 b8c6 e2e4 c7c5 g1f3 d7d6 a1a8"):
        with pytest.raises(NotAGame, match=r"is not a legal move after (4|8|0) half-moves"):
            read_games(illegal)


def test_a_game_from_a_position_starts_there() -> None:
    fen = "rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR w KQkq - 0 2"
    for text in (
        f'[SetUp "1"]\n[FEN "{fen}"]\n\n2. Nf3 Nc6',
        f"{fen} g1f3 b8c6",
        f"FEN: {fen} 1. Nf3 Nc6",
        f"{fen} Nf3 Nc6",
    ):
        game = read_game(text)
        assert game.uci == "g1f3 b8c6" and game.start.fen == fen, text
        assert read_game(game.movetext).uci == game.uci
    black = read_game('[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]\n10... Kd7 11. 0-0-0+ Kc7 1/2-1/2')
    assert black.movetext == '[FEN "4k3/8/8/8/8/8/8/R3K2R b KQ - 0 10"]\n10... Kd7 11. O-O-O+ Kc7 1/2-1/2'
    assert read_game(black.movetext).uci == black.uci == "e8d7 e1c1 d7c7"
    assert read_game(f'[FEN "{chess.STARTING_FEN}"]\ne4').start.is_usual


@pytest.mark.parametrize("tag", ['[Variant "Chess960"]\n', ""])
def test_castling_in_chess960_is_the_king_that_takes_its_rook(tag: str) -> None:
    text = f'{tag}[FEN "rkbnqnrb/pppppppp/8/8/8/8/PPPPPPPP/RKBNQNRB w KQkq - 0 1"]\n'
    text += "1. g3 g6 2. Nc3 Nc6 3. d3 d6 4. Bd2 Bd7 5. O-O-O b8a8"
    game = read_game(text)
    assert game.start.chess960 and game.uci.endswith("b1a1 b8a8")
    board = game.start.board()
    for ply in game.plies:
        assert board.is_legal(board.parse_uci(ply.move.uci()))
        board.push(ply.move)
    assert read_game(game.movetext).uci == game.uci


def test_a_model_that_passes_has_made_no_legal_move() -> None:
    for word in ("0000", "--", "Z0", "@@@@", "", "1-0"):
        assert read_move(chess.Board(), word) is None
    assert read_move(chess.Board(), "Nf3") == read_move(chess.Board(), "g1f3") == chess.Move.from_uci("g1f3")


def test_a_text_without_moves_is_a_game_without_moves() -> None:
    for text in ("", "  \n", "1-0", "*", "{nothing}", '[Event "a"]\n[White "b"]\n'):
        assert read_game(text).plies == [], text


def test_the_first_word_that_could_be_a_move_is_found() -> None:
    assert first_move_of(" 12. Nf3 Nc6") == "Nf3"
    assert first_move_of("12.Nf3 Nc6") == "Nf3"
    assert first_move_of("1-0") == first_move_of("") == ""
